"""The client of a vLLM server: what it sends, which answers it takes, and which servers it refuses."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulated_server
import torch
from simulated_server import SimulatedServer

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.errors import WeightsLost
from groupgrad.integrations.sharding.fsdp import FSDPOptions, shard
from groupgrad.integrations.vllm import client as client_module
from groupgrad.integrations.vllm import server_pool
from groupgrad.integrations.vllm.client import incompatibilities
from groupgrad.integrations.vllm.http import Address, ServerRefused, ServerTimeout, ServerUnreachable, call
from groupgrad.integrations.vllm.media import decode
from groupgrad.integrations.vllm.server_pool import VLLMServerPool
from groupgrad.integrations.vllm.wire import PROTOCOL
from groupgrad.models.shards import is_fully_sharded
from groupgrad.types import Media

OPTIONS = SamplingOptions(max_new_tokens=4, eos_ids=(1,))
ROWS = [Request([5, 6], seed=3, max_new_tokens=4), Request([5, 6], seed=4, max_new_tokens=4)]


@pytest.fixture
def engine(server: SimulatedServer, model: Any) -> VLLMServerPool:
    """An engine that has pushed."""
    engine = server.engine_of(timeout_s=2.0)
    engine.push(model, 3)
    return engine


class Script:
    """In place of the calls for rows: each is answered with the next of `answers`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.answers: list[Iterable[dict[str, Any]]] = []
        self.calls: list[dict[str, Any]] = []
        script = self

        class Call:
            def __init__(self, address: Address, route: str, body: dict[str, Any], *, timeout_s: float):
                self._version, self._answer = body["weight_version"], script.answers.pop(0)
                script.calls.append(body)

            def __iter__(self) -> Iterator[dict[str, Any]]:
                for line in self._answer:
                    yield {"weight_versions": [[self._version, len(line.get("ids", ()))]], **line}

            def close(self) -> None:
                pass

        monkeypatch.setattr(server_pool, "Stream", Call)


@pytest.fixture
def script(engine: VLLMServerPool, monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def row(number: int, ids: list[int], reason: str = "length") -> dict[str, Any]:
    return {"row": number, "ids": ids, "logprobs": [-1.0] * len(ids), "finish_reason": reason}


# --- Rows ---


def test_rows_come_in_any_order_and_share_their_prompt(engine: VLLMServerPool, script: Script) -> None:
    script.answers = [[{}, row(1, [8, 1], "stop"), row(0, [9, 9, 9, 9])]]

    first, second = engine.sample(ROWS, OPTIONS)

    assert (first.ids, first.finish_reason) == ([9, 9, 9, 9], "length")
    assert (second.ids, second.finish_reason, second.logprobs) == ([8, 1], "eos", [-1.0, -1.0])
    (body,) = script.calls
    assert body["prompts"] == [[5, 6]] and body["weight_version"] == engine.weight_version
    assert body["rows"] == [
        {"row": 0, "prompt": 0, "seed": 3, "max_tokens": 4},
        {"row": 1, "prompt": 0, "seed": 4, "max_tokens": 4},
    ]


def test_images_travel_once_however_many_rows_and_turns_need_them(engine: VLLMServerPool, script: Script) -> None:
    image_module = pytest.importorskip("PIL.Image")
    images = tuple(image_module.new("RGB", (3, 2), color) for color in ("red", "blue", "green"))
    two, one = Media(images[:2], {}, {}, "two"), Media(images[2:], {}, {}, "one")
    with_images = [*(replace(item, media=two) for item in ROWS), replace(ROWS[0], media=one), ROWS[0]]
    script.answers = [[row(number, [9]) for number in range(4)]]
    engine.sample(with_images, OPTIONS)
    (body,) = script.calls
    assert body["prompts"] == [[5, 6]] and [item.get("images") for item in body["rows"]] == ["two", "two", "one", None]
    decoded = {key: [decode(text).tobytes() for text in texts] for key, texts in body["images"].items()}
    assert decoded == {media.key: [image.tobytes() for image in media.images] for media in (two, one)}


@pytest.mark.parametrize("given_up", [[], [row(0, [9], "abort")], [row(0, [9], "error")]])
def test_rows_that_an_answer_left_out_or_gave_up_are_asked_for_again(
    given_up: list[dict[str, Any]], engine: VLLMServerPool, script: Script
) -> None:
    script.answers = [[*given_up, row(1, [8], "stop")], [row(0, [9, 7])]]
    samples = engine.sample(ROWS, OPTIONS)
    assert [(sample.ids, sample.finish_reason) for sample in samples] == [([9, 7], "length"), ([8], "eos")]
    assert [item["row"] for item in script.calls[1]["rows"]] == [0]


def test_a_server_that_fails_again_and_again_is_given_up(engine: VLLMServerPool, script: Script) -> None:
    script.answers = [[] for _ in range(9)]
    story = r"again and again .*its answer ended before all rows had; rows that have not ended: 0 \(prompt of 2 tok"
    with pytest.raises(ConnectionError, match=story):
        engine.sample(ROWS, OPTIONS)
    assert len(script.calls) == 4


def test_rows_that_hang_while_the_server_answers_are_named(engine: VLLMServerPool, script: Script) -> None:
    def silence() -> Iterator[dict[str, Any]]:
        yield {}
        raise ServerTimeout("did not answer")

    engine.timeout_s = 1.0
    script.answers = [silence()]
    with pytest.raises(TimeoutError, match=r"sampled no token for 1 s; rows .*: 0 .*workers hang"):
        engine.sample(ROWS, OPTIONS)


def test_rows_of_other_weights_are_refused(engine: VLLMServerPool, script: Script, model: Any) -> None:
    before, now = engine.weight_version, engine.push(model, 4)
    for versions, story in (
        ([[now, 0], ["4-other", 1]], f"the weights '{now}' and '4-other', not '{now}'"),
        ([[before, 1]], f"the weights '{before}', not '{now}'"),
    ):
        script.answers = [[{**row(0, [9]), "weight_versions": versions}]]
        with pytest.raises(RuntimeError, match=f"row 0 was sampled from {story}"):
            engine.sample(ROWS, OPTIONS)


def test_a_row_that_fails_is_named(engine: VLLMServerPool, script: Script) -> None:
    script.answers = [[row(0, [9]), {"row": 1, "error": "ValueError: too long"}]]
    with pytest.raises(ValueError, match=r"row 1 \(a prompt of 2 tokens\): ValueError: too long"):
        engine.sample(ROWS, OPTIONS)


# --- Pushes ---


def test_a_push_brings_all_weights_in_the_dtype_that_the_server_has_now(
    server: SimulatedServer, engine: VLLMServerPool, model: Any
) -> None:
    expected = model.state_dict()
    assert all(torch.equal(server.engine.model.weights[name], expected[name]) for name in expected)
    server.kill()
    server._dtype = "bfloat16"
    server.start()
    weight_version = engine.push(model, 4)
    assert call(server.address, "info", timeout_s=5.0)["weight_version"] == weight_version
    got = server.engine.model.weights
    assert all(torch.equal(got[name], expected[name].bfloat16().float()) for name in expected)


def refuse(*given: Any) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_push_of_ours_that_did_not_end_says_why_and_is_made_again(
    server: SimulatedServer, engine: VLLMServerPool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = r"pushing version 5 to http://.* failed: .*Tried to allocate 2.00 GiB"
    with monkeypatch.context() as patch, pytest.raises(ServerRefused, match=story):
        patch.setattr(server.engine.worker.receiver, "load", refuse)
        engine.push(model, 5)
    engine.sample(ROWS, OPTIONS)
    info = call(server.address, "info", timeout_s=5.0)
    assert info["complete"] and info["weight_version"] == engine.weight_version


def test_a_push_whose_bytes_changed_is_refused(
    server: SimulatedServer, engine: VLLMServerPool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On their way a bit flips; nothing is sampled until a push has been verified."""
    receive = server.engine.worker.receiver._receive

    def flipped(*given: Any) -> torch.Tensor:
        data = receive(*given)
        data[17] ^= 1
        return data

    with monkeypatch.context() as patch, pytest.raises(ServerRefused, match="its bytes have the checksum") as caught:
        patch.setattr(server.engine.worker.receiver, "_receive", flipped)
        engine.push(model, 4)
    assert caught.value.status == 500 and not call(server.address, "info", timeout_s=5.0)["complete"]


def test_a_rank_that_cannot_push_says_that_the_weights_are_lost(
    server: SimulatedServer, engine: VLLMServerPool, model: Any
) -> None:
    other = server.engine_of(pushes=False, timeout_s=0.5)
    other.connect(model)
    other.expect(engine.weight_version)
    server.kill()
    server.start()
    story = f"no vLLM server has the weights '{engine.weight_version}' any more"
    with pytest.raises(WeightsLost, match=story):
        other.sample(ROWS, OPTIONS)


# --- Servers that do not fit ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"protocol": PROTOCOL + 1, "release": "9.0"},
            rf"speaks protocol {PROTOCOL + 1} .groupgrad 9.0., and this trainer speaks protocol {PROTOCOL} .*; start",
        ),
        ({"backend": "nccl"}, r"by the backend 'nccl', .*--weight-transfer-config '.*\"groupgrad\"}'"),
        ({"num_processes": 2}, "answers from 2 processes.*start it with --api-server-count 1"),
        ({"vocab_size": 91}, "its vocabulary has 91 tokens, the policy's 92"),
        ({"max_model_len": 32}, "its context holds 32 tokens, but prompt and completion may have 48"),
        ({"sizes": {"architecture": "LlamaForCausalLM"}}, "architecture 'LlamaForCausalLM'"),
        ({"sizes": {"hidden_size": 33}}, r"hidden_size 33 \(the policy has 32\)"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(
    changes: dict[str, Any], words: str, server: SimulatedServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {**call(server.address, "info", timeout_s=5.0), **changes}
    monkeypatch.setattr(client_module, "wait_until_up", lambda *given, **options: info)
    with pytest.raises(ValueError, match=words):
        server.engine_of().connect(model, num_tokens=48)


def test_a_policy_in_shards_fits_the_server_that_the_whole_one_fits(
    server: SimulatedServer, model: Any, tmp_path: Path
) -> None:
    info = call(server.address, "info", timeout_s=5.0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        shard(model, FSDPOptions(), torch.device("cpu"))
        assert is_fully_sharded(model) and incompatibilities(model, 48, info) == []
    finally:
        torch.distributed.destroy_process_group()


def test_a_regex_that_the_server_refuses_is_named_before_any_row(
    server: SimulatedServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(*given: Any) -> None:
        raise ValueError("unclosed character class")

    monkeypatch.setattr(simulated_server._SamplingParams, "verify", verify)
    for regex, words in (("[a", r"vllm_structured_outputs_regex='\[a'$"), (None, "see generation_kwargs$")):
        with pytest.raises(ValueError, match=rf"refuses the sampling options: unclosed character class; .*{words}"):
            server.engine_of(regex=regex).connect(model, options=OPTIONS)


# --- Addresses and answers ---


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("http://node-5:8001/",), ["http://node-5:8001"]),
        (("https://example.org/serve",), ["https://example.org:443/serve"]),
        ((None, "0.0.0.0", 8123), ["http://127.0.0.1:8123"]),
        (("http://a:1", "b", 2), ["http://a:1"]),
        ((["http://a:1", "https://b"],), ["http://a:1", "https://b:443"]),
        (([], "b", 2), ["http://b:2"]),
    ],
)
def test_addresses(arguments: Any, texts: list[str]) -> None:
    assert list(map(str, Address.all_of(*arguments))) == texts


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        ("node-5:8000", "vllm_server_base_url is 'node-5:8000', which is no address"),
        (["http://a", "http://a:80"], "has http://a:80 more than once; name each server once"),
        ("http://node-5:eight", "'http://node-5:eight', which is no address"),
        ("http://node-5:99999", "'http://node-5:99999', which is no address"),
        (["http://a:1", None], "'None', which is no address"),
    ],
)
def test_addresses_that_cannot_work_are_refused(urls: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Address.all_of(urls)


@pytest.mark.parametrize(
    ("status", "sent", "waits_s", "error"),
    [
        (503, b"starting", 0.0, ServerUnreachable),
        (503, b"starting", 2.0, ServerTimeout),
        (200, b"", 0.0, ServerUnreachable),
        (200, b'{"a": ', 0.0, ServerUnreachable),
    ],
)
def test_an_answer_that_breaks_off_is_a_server_that_went_away(
    status: int, sent: bytes, waits_s: float, error: type[Exception]
) -> None:
    """It announces more bytes than it sends, and then closes or hangs."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(sent)
            self.wfile.flush()
            time.sleep(waits_s)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with pytest.raises(error):
            call(Address.of(port=server.server_port), "info", timeout_s=0.5)
    finally:
        server.shutdown()
        server.server_close()
