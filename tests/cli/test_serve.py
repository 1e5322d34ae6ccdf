"""`groupgrad serve`: answers are those of the model, by the options of each request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from scripted_agents import with_tools

from groupgrad.apps.cli import serve
from groupgrad.apps.serve.serving import ServedModel


@pytest.fixture
def served(tmp_path: Path, make_model: Any, make_tokenizer: Any) -> Iterator[tuple[ServedModel, Any, Any]]:
    """A served model, on a thread of its own, with the model and its tokenizer."""
    model, tokenizer = make_model(), with_tools(make_tokenizer())
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = serve.parser().parse_args([str(tmp_path / "model"), "--max_tokens", "12"])
    found = ServedModel(serve._rollouts(arguments, str(tmp_path / "run")), "secret", "127.0.0.1", 0)
    thread = threading.Thread(target=found.run)
    thread.start()
    yield found, model.eval(), tokenizer
    found.close()
    thread.join(timeout=30)
    assert not thread.is_alive()


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
