"""A stranger on the network of a real vLLM server."""

from __future__ import annotations

import json
from typing import Any

from raw_http import raw_exchange, request
from real_vllm import OPTIONS, Served, requests

from groupgrad.engines.vllm.http import call


def test_without_the_key_nothing_is_told_changed_or_stopped(server: Served, policy: Any) -> None:
    engine = server.engine()
    engine.push(policy, 0)
    version, samples = engine.weight_version, engine.sample(requests(), OPTIONS)
    body = json.dumps({"weight_version": version, "checksum": 0, "model": "x", "prompt": [5, 6]}).encode()
    routes = ("init", "start", "update", "finish", "shutdown", "adapter", "generate")
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
    assert raw_exchange(server.port, request("/groupgrad/start", key=server.key, length=2**40))[0] == 413
    assert raw_exchange(server.port, request("/groupgrad/start", b"{", server.key))[0] == 400
    assert raw_exchange(server.port, request("/groupgrad/finish", body, server.key))[0] == 409
    assert engine.sample(requests(), OPTIONS) == samples
    info = call(server.address, "info", timeout_s=30.0)
    assert info["weight_version"] == version and info["complete"] and server.process is not None
    assert server.process.poll() is None
    # The log of vLLM, which tells its arguments, has the key once: where it is printed.
    assert server.log.read_text(errors="replace").count(server.key) == 1
