"""Routes of groupgrad's server, in front of a scripted application and engine."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tempfile
import time
import urllib.parse
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from simulated_server import Receiver, Weights, pretend_weight_transfer
from starlette.requests import Request

from groupgrad.integrations.vllm import http
from groupgrad.integrations.vllm.http import Address, ServerRefused, ServerTimeout
from groupgrad.integrations.vllm.server import Refusal, Routes
from groupgrad.integrations.vllm.transfer_plugin import FLAGS

KEY = "the-key-of-these-tests"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    pretend_weight_transfer(monkeypatch)


def scope(path: str, **query: str) -> dict[str, Any]:
    """A POST with the key."""
    text = urllib.parse.urlencode(query).encode()
    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    return {"type": "http", "method": "POST", "path": path, "query_string": text, "headers": headers}


def call_of(body: Any = None, **query: str) -> Request:
    """A request with a body of bytes or JSON, and a query."""

    async def receive() -> dict[str, Any]:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return {"type": "http.request", "body": data}

    return Request(scope("/", **query), receive)


class Empty(Receiver):
    """The backend of a model without parameters."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(named_modules=list, named_parameters=list))


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


def answer_to(routes: Routes, engine: Any, path: str, body: Any) -> dict[str, Any]:
    """Status and body of the answer to a call of groupgrad's routes."""
    answer: dict[str, Any] = {}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(event: Any) -> None:
        answer.update({"status": event["status"]} if "status" in event else json.loads(event["body"]))

    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    asyncio.run(routes({**scope(path), "app": app}, receive, send))
    return answer


def test_each_route_says_what_is_wrong() -> None:
    routes, engine = Routes(None), Weights(Empty())
    unseen = answer_to(routes, engine, "/groupgrad/init", {"shared": "groupgrad-" + 32 * "0"})
    assert unseen["status"] == 500 and "this worker does not see the trainer's shared memory" in unseen["error"]
    assert answer_to(routes, engine, "/groupgrad/init", {}) == {"status": 200}
    unknown = answer_to(routes, engine, "/groupgrad/nothing", {})
    assert unknown == {"status": 404, "error": "there is no route /groupgrad/nothing"}
    failed = answer_to(routes, engine, "/groupgrad/finish", {"weight_version": "3-a", "checksum": 0})
    assert failed == {"status": 409, "error": "the push '3-a' is not under way on this server"}


def test_half_a_push_is_finished_by_its_checksum_alone() -> None:
    """Neither a push without a checksum nor an adapter over the base before it makes half-loaded weights complete."""
    routes, engine = Routes(None), Weights(Empty())
    start = {"weight_version": "3-a", "timeout_s": 1.0, "tensors": []}
    assert answer_to(routes, engine, "/groupgrad/start", start) == {"status": 200}
    unchecked = answer_to(routes, engine, "/groupgrad/finish", {"weight_version": "3-a", "checksum": None})
    assert unchecked["status"] == 400 and not routes._weights.is_complete
    query = {"weight_version": "4-a", "base_version": "as loaded"}
    query |= {"timeout_s": "1.0", "config_bytes": "2", "checksum": str(zlib.crc32(b"{}tensors"))}
    with pytest.raises(Refusal, match="belongs to other weights"):
        asyncio.run(routes.route_adapter(engine, call_of(b"{}tensors", **query)))
    assert not routes._weights.is_complete


async def answer_nothing(scope: Any, receive: Any, send: Any) -> None:
    """In place of vLLM's application."""
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def no_body() -> dict[str, Any]:
    """ASGI's `receive` of a request without a body."""
    return {"type": "http.request"}


async def call_vllm(routes: Routes, receive: Any = no_body, **changes: Any) -> dict[str, Any]:
    """The answer to a call of vLLM's own route: `status`, `headers`, `error`. `changes` are of ASGI's scope."""
    answer: dict[str, Any] = {}

    async def send(event: Any) -> None:
        if event["type"] == "http.response.start":
            answer.update(status=event["status"], headers=dict(event["headers"]))
        else:
            answer.update(json.loads(event["body"]))

    await routes({**scope("/v1/completions"), **changes}, receive, send)
    return answer


def test_calls_of_vllms_routes_are_refused_while_weights_are_not_whole() -> None:
    """Also one whose body comes after a push has begun."""

    async def run() -> None:
        body_is_here = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await body_is_here.wait()
            return {"type": "http.request", "body": b"{}"}

        routes, engine = Routes(answer_nothing), Weights(Empty())
        early = asyncio.create_task(call_vllm(routes, receive))
        await asyncio.sleep(0)
        await routes.route_start(engine, call_of({"weight_version": "3-a", "tensors": [], "timeout_s": 1.0}))
        body_is_here.set()
        for answer in (await early, await call_vllm(routes)):
            assert answer["status"] == 503 and answer["headers"][b"retry-after"] == b"1"
            assert answer["error"].startswith("the push '3-a' of weights has not ended")
        assert (await call_vllm(routes, method="GET"))["status"] == 200
        await routes.route_finish(engine, call_of({"weight_version": "3-a", "checksum": 0}))
        assert (await call_vllm(routes))["status"] == 200

    asyncio.run(run())


def test_vllm_gets_the_whole_body_and_then_hears_that_the_caller_left() -> None:
    parts = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"b"}]
    parts.append({"type": "http.request", "body": b"a", "more_body": True})
    heard: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([await receive(), await receive()])

    asyncio.run(call_vllm(Routes(app), receive))
    assert heard == [{"type": "http.request", "body": b"ab", "more_body": False}, {"type": "http.disconnect"}]


def test_an_adapter_is_taken_as_it_was_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    package = ModuleType("vllm.lora.request")
    package.LoRARequest = lambda *given: SimpleNamespace(lora_int_id=given[1], path=Path(given[2]))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.lora.request", package)

    async def add_lora(adapter: Any) -> bool:
        loaded.append(tuple((adapter.path / name).read_bytes() for name in ADAPTER_FILES))
        return True

    routes, engine = Routes(None), Weights(Empty())
    engine.add_lora = engine.remove_lora = add_lora  # type: ignore[attr-defined]
    query = {"weight_version": "1-a", "base_version": "as loaded", "timeout_s": "1.0"}
    query |= {"config_bytes": "2", "checksum": str(zlib.crc32(b"{}tensors"))}

    def push(**changes: str) -> None:
        asyncio.run(routes.route_adapter(engine, call_of(b"{}tensors", **{**query, **changes})))

    for changes, status in (({"checksum": "5"}, 422), ({"base_version": "base-b"}, 409)):
        with pytest.raises(Refusal) as caught:
            push(**changes)
        assert caught.value.status == status and routes._weights.version == "as loaded"
    push()
    assert routes._weights.version == "1-a" and loaded == [(b"{}", b"tensors")]
    assert list(tmp_path.iterdir()) == [], "a server that is killed leaves nothing"
