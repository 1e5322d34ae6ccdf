"""Routes of groupgrad's server, over HTTP and in front of a scripted application."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from raw_http import raw_exchange, request
from simulated_server import KEY, SimulatedServer
from stranger_cases import announce

from groupgrad.integrations.vllm import http
from groupgrad.integrations.vllm.http import Address, ServerRefused, ServerTimeout, call
from groupgrad.integrations.vllm.server import Routes
from groupgrad.integrations.vllm.vllm_params import adapter_bytes
from groupgrad.integrations.vllm.wire import FLAGS
from groupgrad.models.weights import adapter_files

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ADAPTER = {"weight_version": "1-a", "base_version": "as loaded", "timeout_s": 1.0, "config_bytes": 2}
ADAPTER["checksum"] = zlib.crc32(b"{}tensors")


def refused(server: SimulatedServer, route: str, body: Any, **query: Any) -> tuple[int, str]:
    """Status and reason of a call that is refused."""
    with pytest.raises(ServerRefused) as caught:
        call(server.address, route, body, query=query, timeout_s=5.0)
    return caught.value.status, str(caught.value)


def info(server: SimulatedServer) -> dict[str, Any]:
    return call(server.address, "info", timeout_s=5.0)


def test_a_server_does_not_start_in_the_mode_whose_routes_change_weights_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`vllm serve` with groupgrad's middleware, without its command."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with pytest.raises(ValueError, match=r"VLLM_SERVER_DEV_MODE is '1': .*; unset it"):
        Routes(None)


def test_a_server_without_these_routes_is_told_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm serve` without groupgrad's middleware."""

    def refuse(*given: Any, **options: Any) -> dict[str, Any]:
        raise ServerRefused(404, "Not Found")

    monkeypatch.setattr(http, "call", refuse)
    with pytest.raises(ServerRefused, match="has no /groupgrad/info") as refused:
        http.wait_until_up(Address.of(port=8000), timeout_s=1.0)
    assert shlex.split(str(refused.value).partition("`vllm serve` itself has to be given ")[2]) == list(FLAGS)


def test_a_server_that_does_not_come_up_is_given_as_long_in_the_last_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt cut short by the deadline would be told as the server's last failure."""
    waits: set[float] = set()

    def wait(*given: Any, timeout_s: float) -> dict[str, Any]:
        time.sleep(0.05)
        waits.add(timeout_s)
        raise ServerTimeout(f"no answer within {timeout_s:g} s")

    monkeypatch.setattr(http, "call", wait)
    monkeypatch.setattr(http, "POLL_S", 0.01)
    with pytest.raises(
        TimeoutError, match=r"no vLLM server came up .* within 0\.3 s \(last: no answer within 0\.3 s\)"
    ):
        http.wait_until_up(Address.of(port=8000), timeout_s=0.3)
    assert waits == {0.3}


def test_each_route_says_what_is_wrong(server: SimulatedServer) -> None:
    status, reason = refused(server, "init", {"shared": "groupgrad-" + 32 * "0"})
    assert status == 500 and "this worker does not see the trainer's shared memory" in reason
    assert call(server.address, "init", {}, timeout_s=5.0) == {}
    assert refused(server, "nothing", {}) == (404, "there is no route /groupgrad/nothing")
    failed = refused(server, "finish", {"weight_version": "3-a", "checksum": 0})
    assert failed == (409, "the push '3-a' is not under way on this server")


def test_half_a_push_is_finished_by_its_checksum_alone(server: SimulatedServer) -> None:
    """Neither a push without a checksum nor an adapter over the base before it makes half-loaded weights complete."""
    announce(server.engine_of(), "3-a", [])
    assert refused(server, "finish", {"weight_version": "3-a", "checksum": None})[0] == 400
    status, reason = refused(server, "adapter", b"{}tensors", **ADAPTER)
    assert status == 409 and "belongs to other weights" in reason and not info(server)["complete"]


def test_calls_of_vllms_routes_are_refused_while_weights_are_not_whole(server: SimulatedServer, model: Any) -> None:
    trainer = server.engine_of()
    announce(trainer, "3-a", [])
    with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as early:
        early.sendall(request("/v1/completions", b"{}", KEY))
        answer = early.recv(65536).decode()
    assert answer.startswith("HTTP/1.1 503") and "retry-after: 1" in answer
    late = raw_exchange(server.port, request("/v1/completions", b"{}", KEY))
    assert late[0] == 503 and late[1]["error"].startswith("the push '3-a' of weights has not ended")
    assert raw_exchange(server.port, request("/version", key=KEY))[0] == 200
    trainer.push(model, 0)
    assert raw_exchange(server.port, request("/v1/completions", b"{}", KEY))[0] == 200


def test_no_row_begins_while_a_push_waits_for_the_rows_under_way(server: SimulatedServer, model: Any) -> None:
    """vLLM would hold it back, and sample it by the weights that the push brings."""
    server.engine.token_s = 0.05
    row = {"row": 0, "prompt": 0, "seed": 1, "max_tokens": 20}
    rows = {"weight_version": info(server)["weight_version"], "sampling": {}, "prompts": [[5]], "rows": [row]}
    start = {"weight_version": "3-a", "tensors": [], "timeout_s": 30.0}
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(
            raw_exchange, server.port, request("/groupgrad/generate", json.dumps(rows).encode(), KEY)
        )
        while not server.engine.num_running:
            time.sleep(0.01)
        push = threads.submit(call, server.address, "start", start, timeout_s=40.0)
        while server.engine.may_begin.is_set():
            time.sleep(0.01)
        status, reason = refused(server, "generate", rows)
        assert status == 503 and "the push '3-a' of weights has not ended" in reason
        assert first.result()[0] == 200 and server.engine.sampled == [1]
        push.result()


@pytest.fixture
def adapters(server: SimulatedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[bytes, bytes]]:
    """The configurations and tensors that the server has loaded; its files are in `tmp_path`."""
    loaded: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    package = ModuleType("vllm.lora.request")
    package.LoRARequest = lambda *given: SimpleNamespace(lora_int_id=given[1], path=Path(given[2]))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.lora.request", package)

    async def add_lora(adapter: Any) -> bool:
        loaded.append(tuple((adapter.path / name).read_bytes() for name in ADAPTER_FILES))
        return True

    async def remove_lora(number: int) -> None:
        assert number == len(loaded) - 1

    server.engine.add_lora, server.engine.remove_lora = add_lora, remove_lora  # type: ignore[attr-defined]
    return loaded


def test_an_adapter_is_taken_as_it_was_sent(server: SimulatedServer, adapters: Any, tmp_path: Path) -> None:
    for changes, status in (({"checksum": 5}, 422), ({"base_version": "base-b"}, 409)):
        assert refused(server, "adapter", b"{}tensors", **{**ADAPTER, **changes})[0] == status
        assert info(server)["weight_version"] == "as loaded"
    call(server.address, "adapter", b"{}tensors", query=ADAPTER, timeout_s=5.0)
    assert info(server)["weight_version"] == "1-a" and adapters == [(b"{}", b"tensors")]
    assert list(tmp_path.iterdir()) == [], "a server that is killed leaves nothing"


def test_an_adapter_goes_alone_and_the_weights_below_it_once(
    server: SimulatedServer, adapters: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    policy = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    base = policy.get_base_model().lm_head.weight
    pool, started = server.engine_of(), []
    start = server.engine.start_weight_update
    monkeypatch.setattr(server.engine, "start_weight_update", lambda: started.append(1) or start())
    for step in range(2):
        assert pool.push_adapter(policy, step) == info(server)["weight_version"]
    assert len(started) == 1 and torch.equal(server.engine.model.weights["lm_head.weight"], base)
    (first, tensors), (second, again) = adapters
    assert first == second and b'"r": 4' in first
    assert tensors == again == adapter_bytes(adapter_files(policy), torch.float32)[1]
