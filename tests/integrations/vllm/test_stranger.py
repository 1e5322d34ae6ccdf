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
    bad_bodies_are_refused,
    bucket_is_refused,
    head_of,
    nothing_is_sampled,
    pickles_stay_closed,
    send_half_a_push,
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
