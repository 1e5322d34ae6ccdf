"""`groupgrad serve`: answers are those of the model, by the options of each request."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch
from fixed_answers import send
from scripted_agents import with_tools
from waiting import until

from groupgrad.apps.cli import serve
from groupgrad.apps.serve import serving
from groupgrad.apps.serve.serving import ServedModel
from groupgrad.integrations.agents.server import listen


@pytest.fixture
def prepared(tmp_path: Path, make_model: Any, make_tokenizer: Any) -> Iterator[tuple[Any, Any, Any]]:
    """`prepare(timeout_s, listening)`, which makes a served model that does not run yet; the model; its tokenizer."""
    model, tokenizer = make_model(), with_tools(make_tokenizer())
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = serve.parser().parse_args([str(tmp_path / "model"), "--max_tokens", "12"])
    made: list[ServedModel] = []

    def prepare(timeout_s: float = 600.0, listening: Any = None) -> ServedModel:
        rollouts = serve._rollouts(arguments, str(tmp_path / "run"))
        made.append(ServedModel(rollouts, "secret", listening or listen(), timeout_s))
        return made[-1]

    yield prepare, model.eval(), tokenizer
    for found in made:
        found.close()


@contextmanager
def running(found: ServedModel) -> Iterator[None]:
    """The model is served on a thread of its own."""
    thread = threading.Thread(target=found.run)
    thread.start()
    try:
        yield
    finally:
        found.close()
        thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.fixture
def served(prepared: Any) -> Iterator[tuple[ServedModel, Any, Any]]:
    """A served model, with the model and its tokenizer."""
    prepare, model, tokenizer = prepared
    found = prepare()
    with running(found):
        yield found, model, tokenizer


def client_of(found: ServedModel, key: str = "secret") -> Any:
    return openai.OpenAI(base_url=found.address.url, api_key=key, max_retries=0)


def test_the_most_likely_tokens_are_those_of_generate(served: Any) -> None:
    found, model, tokenizer = served
    client = client_of(found)
    for text in ("1+1=", "2+3=5", "7"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=1, pad_token_id=0)
        answer = client.completions.create(model="m", prompt=ids[0].tolist(), temperature=0)
        assert answer.choices[0].text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)


def test_requests_of_many_options_are_answered(served: Any) -> None:
    client = client_of(served[0])

    def ask(number: int) -> Any:
        messages = [{"role": "user", "content": str(number)}]
        options = [{}, {"temperature": 0.5}, {"top_p": 0.9, "temperature": 0.7}][number % 3]
        return client.chat.completions.create(model="m", messages=messages, max_tokens=4, **options)

    with ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(ask, range(48)))
    assert all(1 <= answer.usage.completion_tokens <= 4 for answer in answers)
    texts = {client.completions.create(model="m", prompt="1", max_tokens=8).choices[0].text for _ in range(8)}
    assert len(texts) > 1, "each request has a stream of its own"


def test_what_is_refused(served: Any) -> None:
    found, *_ = served
    with pytest.raises(openai.AuthenticationError):
        client_of(found, "another").models.list()
    with pytest.raises(openai.BadRequestError, match="512 positions"):
        client_of(found).completions.create(model="m", prompt=[5] * 600)
    for prompt in ([5, 10**6], [-1], ""):
        with pytest.raises(openai.BadRequestError, match="no token"):
            client_of(found).completions.create(model="m", prompt=prompt)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        client_of(found).completions.create(model="m", prompt="1", frequency_penalty=1.0)


def test_a_model_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    assert serve.main([str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(capsys: Any, monkeypatch: Any) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(serve, "_rollouts", lambda *arguments: loaded.append(arguments))
    with listen() as taken:
        port = taken.getsockname()[1]
        assert serve.main(["model", "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 is in use by another program" in said and "set --port to another" in said
    assert serve.main(["model", "--host", "no.such.host.invalid"]) == 1
    assert "nothing can be served at no.such.host.invalid, port 0" in capsys.readouterr().err
    assert not loaded


def test_the_options_reach_the_served_model(capsys: Any, monkeypatch: Any) -> None:
    made: list[Any] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    def make(rollouts: Any, key: str, listening: Any, timeout_s: float = 600.0) -> Any:
        made.append((rollouts, key, listening.getsockname()[0], timeout_s))
        return SimpleNamespace(address=SimpleNamespace(url="the address"), run=interrupt, close=lambda: None)

    monkeypatch.setattr(serve, "_rollouts", lambda arguments, folder: arguments.model)
    monkeypatch.setattr(serving, "ServedModel", make)
    assert serve.main(["some model", "--api-key", "k", "--host", "127.0.0.1", "--timeout", "2.5"]) == 0
    assert made == [("some model", "k", "127.0.0.1", 2.5)]
    assert "some model is served at the address with the key k" in capsys.readouterr().out


def test_what_connects_while_the_model_loads_is_answered(prepared: Any) -> None:
    with listen() as listening, ThreadPoolExecutor(1) as threads:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
        answer = threads.submit(send, url, {"prompt": "1", "max_tokens": 2}, authorization="Bearer secret")
        time.sleep(0.2)
        with running(prepared[0](listening=listening)):
            assert answer.result(timeout=60)[0] == 200


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--timeout", "0", "'0' is no number of seconds above 0"),
        ("--port", "70000", "'70000' is no port; give 1 to 65535"),
    ],
)
def test_options_that_cannot_work(option: str, value: str, said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        serve.main(["model", option, value])
    assert end.value.code == 2 and said in capsys.readouterr().err


def metrics_of(found: ServedModel) -> dict[str, float]:
    """The numbers of `/metrics` by their names."""
    status, text = send(found.address.url.replace("/v1", "/metrics"), authorization="Bearer secret")
    assert status == 200
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    described = re.findall("^# TYPE (\\w+) (?:counter|gauge)$", text, re.MULTILINE)
    assert described == [line.split()[0] for line in lines]
    return {name.removeprefix("groupgrad_"): float(value) for name, value in map(str.split, lines)}


def test_metrics(served: Any) -> None:
    found, *_ = served
    client = client_of(found)
    before = metrics_of(found)
    assert set(before.values()) == {0.0}
    answers = [client.completions.create(model="m", prompt="1+1=", max_tokens=most) for most in (1, 4)]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="m", prompt="")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="m", prompt="1", best_of=3)
    status, _ = send(
        f"{found.address.url}/messages",
        {"max_tokens": 2, "messages": [{"role": "user", "content": "1"}]},
        x_api_key="secret",
    )
    after = metrics_of(found)
    assert status == 200 and (after["requests_answered_total"], after["requests_refused_total"]) == (3, 2)
    assert after["requests_under_way"] == 0 and after["sampling_seconds_total"] > 0
    assert after["tokens_read_total"] > sum(answer.usage.prompt_tokens for answer in answers)
    written = sum(answer.usage.completion_tokens for answer in answers)
    assert written < after["tokens_written_total"] <= written + 2
    assert send(found.address.url.replace("/v1", "/metrics"))[0] == 401


class Watched:
    """An engine that notes its requests in `asked` and those that end early in `aborted`, and whose steps take `step_s`
    seconds more."""

    def __init__(self, engine: Any, step_s: float = 0.0):
        self._engine, self._step_s = engine, step_s
        self.asked: list[Any] = []
        self.aborted: list[int] = []

    @contextmanager
    def session(self, options: Any) -> Iterator[Any]:
        with self._engine.session(options) as session:

            def submit(request: Any) -> int:
                self.asked.append(request)
                return session.submit(request)

            def advance() -> Any:
                time.sleep(self._step_s)
                return session.advance()

            def abort(tickets: Any) -> None:
                self.aborted += tickets
                session.abort(tickets)

            yield SimpleNamespace(submit=submit, advance=advance, release=session.release, abort=abort)


def test_a_request_that_waits_too_long_is_told_and_never_sampled(prepared: Any) -> None:
    found = prepared[0](2.0)
    began = time.monotonic()
    with pytest.raises(openai.APIStatusError, match="not answered within its 2 seconds") as late:
        client_of(found).completions.create(model="m", prompt="1", max_tokens=4)
    assert late.value.status_code == 503 and late.value.code == "timeout" and 2 <= time.monotonic() - began < 15
    found._rollouts.engine = engine = Watched(found._rollouts.engine)
    with running(found):
        answer = client_of(found).completions.create(model="m", prompt="2", max_tokens=4)
        counts = metrics_of(found)
    assert 1 <= answer.usage.completion_tokens <= 4
    assert len(engine.asked) == 1, "the late request was sampled too"
    assert (counts["requests_answered_total"], counts["requests_refused_total"]) == (1, 1)
    assert counts["tokens_written_total"] == answer.usage.completion_tokens


def test_a_request_that_is_sampled_too_long_is_told_and_sampled_no_further(prepared: Any) -> None:
    found = prepared[0](1.0)
    found._rollouts.engine = engine = Watched(found._rollouts.engine, step_s=2.0)
    with running(found):
        with ThreadPoolExecutor(1) as threads:
            late = threads.submit(client_of(found).completions.create, model="m", prompt="1", max_tokens=12)
            while not engine.asked:
                time.sleep(0.01)
            assert metrics_of(found)["requests_under_way"] == 1
            with pytest.raises(openai.APIStatusError, match="not answered within its 1 seconds"):
                late.result(timeout=30)
        assert metrics_of(found)["requests_under_way"] == 0
        until(lambda: engine.aborted == [0])


def test_a_request_whose_client_goes_away_is_sampled_no_further(prepared: Any) -> None:
    """As where a browser's page is closed; the next one is answered at once."""
    found = prepared[0]()
    found._rollouts.engine = engine = Watched(found._rollouts.engine, step_s=0.5)
    with running(found):
        where = urlsplit(found.address.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20)
        body = json.dumps({"prompt": "1", "max_tokens": 12, "n": 3, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Authorization": "Bearer secret"})
        until(lambda: len(engine.asked) == 3)
        connection.close()
        until(lambda: len(engine.aborted) == 3)
        assert client_of(found).completions.create(model="m", prompt="2", max_tokens=1).usage.completion_tokens == 1
        assert metrics_of(found)["requests_refused_total"] == 1


def test_a_seed_is_that_of_the_random_stream(served: Any) -> None:
    client = client_of(served[0])

    def texts(**options: Any) -> list[str]:
        return [choice.text for choice in client.completions.create(model="m", prompt="1+1=", **options).choices]

    assert texts(seed=7) == texts(seed=7) != texts(seed=8)
    assert texts(seed=7, n=3) == texts(seed=7) + texts(seed=8) + texts(seed=9)
    assert texts(seed=-(2**70))
    with pytest.raises(openai.BadRequestError, match=r"seed=0\.5 is no whole number"):
        client.completions.create(model="m", prompt="1", extra_body={"seed": 0.5})


def test_a_page_of_any_origin_may_ask_from_a_browser(served: Any) -> None:
    where = urlsplit(served[0].address.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20)
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    connection.request("OPTIONS", "/v1/chat/completions", headers={"Origin": "https://a.example", **asks})
    allowed = connection.getresponse()
    allowed.read()
    assert allowed.status == 200 and allowed.headers["Access-Control-Allow-Origin"] == "*"
    assert "authorization" in allowed.headers["Access-Control-Allow-Headers"]
    connection.request("GET", "/v1/models", headers={"Origin": "https://a.example", "Authorization": "Bearer secret"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == "*"
