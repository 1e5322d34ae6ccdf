"""A stranger on the network of a real vLLM server, and a trainer that misbehaves.

After each attack the weights are what they were, and the same process samples from them.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_http import raw_exchange, request
from real_vllm import OPTIONS, Served, requests
from stranger_cases import (
    bad_bodies_are_refused,
    nothing_is_sampled,
    pickles_stay_closed,
    send_half_a_push,
)

from groupgrad.integrations.vllm.http import call
from groupgrad.integrations.vllm.server_pool import VLLMServerPool


@pytest.fixture
def trainer(server: Served, policy: Any) -> Iterator[VLLMServerPool]:
    """A trainer that has pushed. When a test ends, weights and samples have to be those of the push."""
    engine = server.engine()
    engine.push(policy, 0)
    process, samples = server.process, engine.sample(requests(), OPTIONS)
    yield engine
    assert [(sample.ids, sample.logprobs) for sample in engine.sample(requests(), OPTIONS)] == [
        (sample.ids, sample.logprobs) for sample in samples
    ]
    info = call(server.address, "info", timeout_s=30.0)
    assert info["weight_version"] == engine.weight_version and info["complete"]
    assert process is not None and server.process is process and process.poll() is None
    assert raw_exchange(server.port, request("/health"))[0] == 200


def test_without_the_key_nothing_is_told_changed_or_stopped(server: Served, policy: Any) -> None:
    engine = server.engine()
    engine.push(policy, 0)
    version, samples = engine.weight_version, engine.sample(requests(), OPTIONS)
    body = json.dumps({"weight_version": version, "checksum": 0, "model": "x", "prompt": [5, 6]}).encode()
    routes = ("init", "start", "update", "finish", "adapter", "generate")
    posts = [*(f"/groupgrad/{route}" for route in routes), "/pause", "/start_weight_update", "/finish_weight_update"]
    posts += ["/v1/completions", "/tokenize", "/inference/v1/generate", "/invocations"]
    for key in (None, "wrong"):
        for path in posts:
            assert raw_exchange(server.port, request(path, body, key))[0] == 401, path
            assert raw_exchange(server.port, request(path, key=key, length=2**40))[0] == 401, path
        for path in ("/groupgrad/info", "/version", "/metrics", "/openapi.json", "/docs", "/v1/models", "/"):
            status, answer = raw_exchange(server.port, request(path, key=key))
            assert status == 401 and "0." not in str(answer), path
    assert raw_exchange(server.port, request("/health"))[0] == 200

    assert raw_exchange(server.port, request("/version", key=server.key))[0] == 200
    assert raw_exchange(server.port, request("/groupgrad/start", b"{", server.key))[0] == 400
    assert raw_exchange(server.port, request("/groupgrad/finish", body, server.key))[0] == 409
    assert engine.sample(requests(), OPTIONS) == samples
    info = call(server.address, "info", timeout_s=30.0)
    assert info["weight_version"] == version and info["complete"] and server.process is not None
    assert server.process.poll() is None
    # The log of vLLM, which tells its arguments, has the key once: where it is printed.
    assert server.log.read_text(errors="replace").count(server.key) == 1


def test_a_push_waits_for_nobody_who_reads_nothing(server: Served, trainer: VLLMServerPool, policy: Any) -> None:
    """A thousand streamed rows, of which the caller reads the first bytes alone."""
    model = call(server.address, "info", timeout_s=30.0)["model"]
    fields = {"prompt": [[5, 6]] * 1000, "max_tokens": 40, "stream": True, "logprobs": 1, "ignore_eos": True}
    with socket.create_connection(("127.0.0.1", server.port), timeout=60.0) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        call_of_vllm = request("/v1/completions", json.dumps({"model": model, **fields}).encode(), server.key)
        connection.sendall(call_of_vllm.replace(b"Host: x", b"Host: x\r\nContent-Type: application/json"))
        assert connection.recv(12) == b"HTTP/1.1 200"
        started = time.monotonic()
        trainer.push(policy, 1)
        assert time.monotonic() - started < 60.0


def test_bad_bodies_are_bad_requests(server: Served, trainer: VLLMServerPool) -> None:
    bad_bodies_are_refused(trainer, server.port, server.key)


def test_half_a_push_and_then_silence_is_mended_by_another_trainer(
    server: Served, trainer: VLLMServerPool, policy: Any
) -> None:
    samples = trainer.sample(requests(), OPTIONS)
    send_half_a_push(trainer, policy)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        nothing_is_sampled(trainer, server.port, server.key)
    other, started = server.engine(), time.monotonic()
    other.push(policy, 1)
    assert time.monotonic() - started < 60.0
    assert [sample.ids for sample in other.sample(requests(), OPTIONS)] == [sample.ids for sample in samples]
    trainer.push(policy, 0)


def test_nothing_is_unpickled(server: Served, trainer: VLLMServerPool, policy: Any, tmp_path: Path) -> None:
    pickles_stay_closed(server.port, server.key, trainer, tmp_path)
    trainer.push(policy, 0)
