"""Routes of groupgrad's server, in front of a scripted application and engine."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupgrad.engines.vllm import server as server_module
from groupgrad.engines.vllm.http import GROUP_LEFT_STATUS
from groupgrad.engines.vllm.server import Routes
from groupgrad.engines.vllm.server_requests import Call, Refusal
from groupgrad.engines.vllm.wire import TensorSpec
from groupgrad.engines.vllm.worker import OTHER_GROUP, WeightReceiver

KEY = "the-key-of-these-tests"


class Engine:
    """An engine with one worker, whose errors it wraps as vLLM does."""

    def __init__(self, worker: Any):
        self._worker = worker

    async def reset_prefix_cache(self) -> bool:
        return True

    async def reset_encoder_cache(self) -> None:
        pass

    async def update_weight_version(self, version: str) -> None:
        pass

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        try:
            return [getattr(self._worker, name)(*args, **(kwargs or {}))]
        except RuntimeError as error:
            raise Exception(f"Call to {name} method failed: {error}") from None


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def scope(path: str, **query: str) -> dict[str, Any]:
    """A POST with the key."""
    text = urllib.parse.urlencode(query).encode()
    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    return {"type": "http", "method": "POST", "path": path, "query_string": text, "headers": headers}


def call_of(body: Any = None, **query: str) -> Call:
    """A request with a body of bytes or JSON, and a query."""

    async def receive() -> dict[str, Any]:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return {"type": "http.request", "body": data}

    return Call(scope("/", **query), receive)


def test_a_worker_in_another_group_has_a_status_of_its_own() -> None:
    routes = Routes(None)
    routes._weights.begin("3-a", [TensorSpec("a", "uint8", (64,))])
    engine = Engine(WeightReceiver())
    bucket = call_of(weight_version="3-a", first="0", count="1", group="mine", num_bytes="64")
    with pytest.raises(Refusal, match=f"{OTHER_GROUP} None, and weights are to come over mine") as caught:
        asyncio.run(routes.route_bucket(engine, bucket))
    assert caught.value.status == GROUP_LEFT_STATUS


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


def test_routes_of_workers_answer_for_each_worker() -> None:
    routes, engine = Routes(None), Engine(WeightReceiver())
    reads = answer_to(routes, engine, "/groupgrad/reads", {"name": "groupgrad-" + 32 * "0"})
    assert reads == {"status": 200, "workers": [False]}
    assert answer_to(routes, engine, "/groupgrad/leave", {"name": "mine"}) == {"status": 200, "workers": [None]}
    unknown = answer_to(routes, engine, "/groupgrad/nothing", {})
    assert unknown == {"status": 404, "error": "there is no route /groupgrad/nothing"}
    failed = answer_to(routes, engine, "/groupgrad/commit", {"weight_version": "3-a", "checksum": 0})
    assert failed == {"status": 409, "error": "the push '3-a' is not under way on this server"}


class Quiet:
    """A worker that accepts everything."""

    def groupgrad_begin(self, specs: Any) -> None:
        pass

    def groupgrad_commit(self, checksum: int) -> None:
        pass


class App:
    """In place of vLLM's application; its answers wait for `may_end`."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def call_vllm(routes: Routes) -> dict[str, Any]:
    """The answer to a call of vLLM's own route: `status`, `headers`, `error`."""
    answer: dict[str, Any] = {}

    async def send(event: Any) -> None:
        if event["type"] == "http.response.start":
            answer.update(status=event["status"], headers=dict(event["headers"]))
        else:
            answer.update(json.loads(event["body"]))

    await routes(scope("/v1/completions"), None, send)
    return answer


async def begin_push(routes: Routes, timeout_s: float) -> asyncio.Task[Any]:
    """A push that waits for rows to end."""
    push = asyncio.create_task(
        routes.route_begin(
            Engine(Quiet()),
            call_of(
                {
                    "weight_version": "3-a",
                    "push": routes._weights.next_push,
                    "tensors": [],
                    "timeout_s": timeout_s,
                }
            ),
        )
    )
    await asyncio.sleep(0.05)
    return push


def test_calls_are_refused_while_a_push_waits() -> None:
    async def run() -> None:
        app = App()
        routes = Routes(app)
        early = asyncio.create_task(call_vllm(routes))
        await asyncio.sleep(0)
        push = await begin_push(routes, 5.0)
        late = await call_vllm(routes)
        assert late["status"] == 503 and late["headers"][b"retry-after"] == b"1" and "waits for rows" in late["error"]
        assert not push.done() and not early.done()
        app.may_end.set()
        assert (await early)["status"] == 200 and await push is None
        assert (await call_vllm(routes))["error"].startswith("the push '3-a' of weights has not ended")
        await routes.route_commit(Engine(Quiet()), call_of({"weight_version": "3-a", "checksum": 0}))
        assert (await call_vllm(routes))["status"] == 200

    asyncio.run(run())


def test_a_push_that_times_out_leaves_the_server_as_it_was() -> None:
    async def run() -> None:
        app = App()
        routes = Routes(app)
        early = asyncio.create_task(call_vllm(routes))
        await asyncio.sleep(0)
        push = await begin_push(routes, 0.1)
        with pytest.raises(Refusal, match=r"1 rows still sample after 0\.1 s"):
            await push
        late = asyncio.create_task(call_vllm(routes))
        await asyncio.sleep(0)
        app.may_end.set()
        assert [(await early)["status"], (await late)["status"]] == [200, 200]

    asyncio.run(run())


def test_an_adapter_is_taken_once_and_as_it_was_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[tuple[Any, ...]] = []

    def request(*given: Any) -> Any:
        loaded.append(given)
        return SimpleNamespace(lora_int_id=given[1], lora_path=str(tmp_path / "none"))

    async def add_lora(adapter: Any) -> bool:
        return True

    monkeypatch.setattr(server_module, "lora_request", request)
    routes, engine = Routes(None), Engine(Quiet())
    engine.add_lora = engine.remove_lora = add_lora  # type: ignore[attr-defined]
    token = routes._weights.next_push
    query = {"weight_version": "1-a", "base_version": "as loaded", "push": token, "timeout_s": "1.0"}
    query |= {"config_bytes": "2", "checksum": str(zlib.crc32(b"{}tensors"))}

    def push(**changes: str) -> None:
        asyncio.run(routes.route_adapter(engine, call_of(b"{}tensors", **{**query, **changes})))

    for changes, status in (({"checksum": "5"}, 422), ({"base_version": "base-b"}, 409), ({"timeout_s": "1e9"}, 400)):
        with pytest.raises(Refusal) as caught:
            push(**changes)
        assert caught.value.status == status and routes._weights.version == "as loaded"
    push()
    assert routes._weights.version == "1-a" and loaded[-1][3:] == (b"{}", b"tensors")
    with pytest.raises(Refusal, match="or this one was sent before"):
        push()
    assert len(loaded) == 1 and routes._weights.is_complete
