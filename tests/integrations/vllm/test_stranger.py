"""A stranger on the network, and a trainer that misbehaves, against a server over real HTTP.

After each attack the weights are what they were, and the server samples for its trainer.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_http import raw_exchange, request
from simulated_server import KEY, SimulatedServer
from stranger_cases import (
    BUCKETS,
    announce,
    answered_408,
    bad_bodies_are_refused,
    bucket_is_refused,
    head_of,
    nothing_is_sampled,
    pickles_stay_closed,
    send_half_a_push,
    slow_bodies,
)

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.integrations.vllm import server as server_module
from groupgrad.integrations.vllm.http import call
from groupgrad.integrations.vllm.server_pool import VLLMServerPool

OPTIONS = SamplingOptions(max_new_tokens=4, eos_ids=(1,))
ROWS = [Request([5, 6], seed=number, max_new_tokens=4) for number in range(3)]


@pytest.fixture
def trainer(server: SimulatedServer, model: Any) -> Iterator[VLLMServerPool]:
    """A trainer that has pushed. When a test ends, weights and samples have to be those of the push."""
    engine = server.engine_of()
    engine.push(model, 0)
    digest, ids = server.engine.model.digest, [sample.ids for sample in engine.sample(ROWS, OPTIONS)]
    yield engine
    assert server.engine.model.digest == digest
    assert [sample.ids for sample in engine.sample(ROWS, OPTIONS)] == ids
    assert call(engine.members[0].address, "info", timeout_s=5.0)["weight_version"] == engine.weight_version


def text(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


PUSH = [
    ("start", text(weight_version="9-x", push="0", tensors=[["lm_head.weight", "float32", [92, 32]]], timeout_s=1.0)),
    ("update", bytes(92 * 32 * 4)),
    ("finish", text(weight_version="9-x", checksum=0)),
]


@pytest.mark.fault(
    "a stranger without the key pushes weights to a vLLM server, commits, or asks what it serves",
    "status 401, without the server's version; weights stay, sampling goes on",
    "nothing",
)
def test_without_the_key_nothing_is_answered(server: SimulatedServer, trainer: VLLMServerPool) -> None:
    version = trainer.weight_version
    paths = [(f"/groupgrad/{route}", body) for route, body in PUSH]
    paths += [("/groupgrad/finish", text(weight_version=version, checksum=0))]
    paths += [("/groupgrad/init", text(host="10.0.0.1", port=1)), ("/groupgrad/adapter", b"x"), ("/groupgrad/no", b"x")]
    paths += [("/start_weight_update", b""), ("/finish_weight_update", text(weight_version=version)), ("/pause", b"")]
    paths += [("/groupgrad/info", b""), ("/version", b""), ("/v1/completions", text(prompt="a")), ("//version", b"")]
    for key, (path, body) in itertools.product((None, "", "wrong", KEY + "x", KEY[:-1]), paths):
        status, answer = raw_exchange(server.port, request(path, body, key, weight_version=version, first=0, count=1))
        assert (status, list(answer)) == (401, ["error"]), path
        assert "0.32" not in str(answer) and "groupgrad 1" not in str(answer)
    assert raw_exchange(server.port, request("/health")) == (200, {})
    assert raw_exchange(server.port, request("/version", key=KEY)) == (200, {"version": "0.32.0"})
    assert raw_exchange(server.port, request("/groupgrad/info", key=KEY))[1]["complete"] is True
    upgrade = request("/v1/realtime", key=KEY).replace(
        b"Connection: close", b"Connection: Upgrade\r\nUpgrade: websocket"
    )
    status, _ = raw_exchange(server.port, upgrade, timeout_s=1.0)
    assert status != 101


@pytest.mark.fault(
    "a huge body, a slow body, or half a body is sent to a vLLM server",
    "it is refused by its length before it is read (413), or after its time (408); others are answered meanwhile",
    "nothing",
)
def test_a_huge_body_is_refused_before_it_is_read(server: SimulatedServer, trainer: Any) -> None:
    for key, route in itertools.product((None, KEY), ("check", "start", "generate", "adapter", "init")):
        query = {"weight_version": "9-x", "base_version": "b", "config_bytes": 1, "checksum": 0, "timeout_s": 1.0}
        head = request(f"/groupgrad/{route}", key=key, length=2**40, **query)
        status, answer = raw_exchange(server.port, head)
        assert status == (401 if key is None else 413), (route, answer)
    assert raw_exchange(server.port, request("/v1/completions", key=KEY, length=2**40))[0] == 413


def test_a_body_without_a_length_is_refused_when_it_is_too_long(server: SimulatedServer, trainer: Any) -> None:
    head = request("/groupgrad/check", key=KEY, length=1).replace(b"Content-Length: 1", b"Transfer-Encoding: chunked")
    chunk = f"{2**19:x}\r\n".encode() + b" " * 2**19 + b"\r\n"
    status, answer = raw_exchange(server.port, head, *[chunk] * 3)
    assert status == 413 and "takes at most 1048576" in answer["error"]


@pytest.mark.slow
def test_a_slow_body_is_given_up_and_holds_nothing_up(
    server: SimulatedServer, trainer: VLLMServerPool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PATIENCE_S", 2.0)
    with slow_bodies(server.port, KEY) as connections:
        started = time.monotonic()
        trainer.push(model, 1)  # waits for none of them
        assert len(trainer.sample(ROWS, OPTIONS)) == 3 and time.monotonic() - started < 1.6
        answered_408(connections)
        assert time.monotonic() - started < 4.0


def test_bad_bodies_are_bad_requests(server: SimulatedServer, trainer: VLLMServerPool) -> None:
    bad_bodies_are_refused(trainer, server.port, KEY)


def test_a_bucket_of_other_tensors_reaches_no_worker(
    server: SimulatedServer, trainer: VLLMServerPool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(trainer, "1-x", [head_of(model)])
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.worker, "update_weights", lambda *given: pytest.fail("it reached a worker"))
        for bucket in BUCKETS:
            bucket_is_refused(trainer, model, *bucket)
    trainer.push(model, 0)


@pytest.mark.fault(
    "half a push comes to a vLLM server, and then nothing",
    "it answers, but samples nothing until another push has ended, which may begin at once",
    "nothing",
)
def test_half_a_push_and_then_silence_holds_up_no_other_push(
    server: SimulatedServer, trainer: VLLMServerPool, model: Any
) -> None:
    send_half_a_push(trainer, model)
    nothing_is_sampled(trainer, server.port, KEY)
    started = time.monotonic()
    trainer.push(model, 1)
    assert time.monotonic() - started < 2.0


def test_nothing_is_unpickled(server: SimulatedServer, trainer: VLLMServerPool, tmp_path: Path, model: Any) -> None:
    pickles_stay_closed(server.port, KEY, trainer, tmp_path)
    sources = Path(server_module.__file__).parent.glob("*.py")
    assert not [path for path in sources if "pickle" in path.read_text() or "torch.load" in path.read_text()]
    trainer.push(model, 0)
