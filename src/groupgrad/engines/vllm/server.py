"""Routes that groupgrad adds to vLLM's server: pushes of weights that are verified, and rows that name their weights.

vLLM's server loads `Routes` (`--middleware`) in front of its own routes. They are:

- GET `/groupgrad/info`: the model, this start of the server, and its weights.
- POST `/groupgrad/check`: reject sampling options that vLLM refuses.
- POST `/groupgrad/generate`: rows in, a line of JSON for each row as it ends, and a heartbeat every second.
- POST `/groupgrad/reads`, `/groupgrad/devices`, `/groupgrad/open`, `/groupgrad/join`, `/groupgrad/leave`: call that
  method of all workers, to find out and set up how buckets come to them.
- POST `/groupgrad/begin`, `/groupgrad/bucket`, `/groupgrad/commit`: a push of weights.
- POST `/groupgrad/adapter`: a push of an adapter.

Weights are *complete* when a whole push has arrived and was verified. Until then no route samples: after a push that
broke off, the server refuses to sample until another push has ended. A push first waits for rows under way; vLLM's own
routes refuse new calls meanwhile, with a `Retry-After`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from groupgrad import compat
from groupgrad._version import __version__
from groupgrad.engines.vllm.http import GROUP_LEFT_STATUS
from groupgrad.engines.vllm.lora import lora_request
from groupgrad.engines.vllm.row_stream import RowStream, ServerLoad
from groupgrad.engines.vllm.vllm_params import sampling_params, verify
from groupgrad.engines.vllm.wire import PROTOCOL, model_sizes
from groupgrad.engines.vllm.worker import EXTENSION, OTHER_GROUP, REFUSED

logger = logging.getLogger(__name__)

MIDDLEWARE = "groupgrad.engines.vllm.server.Routes"
PREFIX = "/groupgrad/"
RETRY_S = 1
"""Seconds after which a caller that was refused during a push may retry."""
AS_LOADED = "as loaded"
"""Version of the weights that the server read from disk when it started."""
WORKER_ROUTES = frozenset({"reads", "devices", "open", "join", "leave"})
"""Routes that call the method `groupgrad_<route>` of all workers, with the fields of the body."""


class Refusal(Exception):
    """A request that cannot be answered: HTTP status and reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(slots=True)
class ServerWeights:
    """State of the server's weights."""

    version: str = AS_LOADED
    """Weight version of the last push that was verified."""
    base_version: str = AS_LOADED
    """Weight version of the last verified push of whole weights; pushes of adapters leave it."""
    is_complete: bool = True
    """False from the start of a push until one has been verified."""
    pending_version: str | None = None
    """Weight version of the push under way, or of the last that broke off."""
    adapter: Any = None
    """vLLM's request for the adapter that rows are sampled with."""
    num_adapters: int = 0
    """Adapters pushed since the start."""
    push_is_waiting: bool = False
    """True while a push waits for rows to end."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def not_complete(self) -> Refusal:
        """Refuses to sample before a push has ended."""
        return Refusal(
            503, f"the push {self.pending_version!r} of weights has not ended; nothing is sampled until one has"
        )

    def begin(self, version: str) -> None:
        """Mark the weights incomplete until the push ends."""
        self.is_complete, self.pending_version = False, version


class Routes:
    """ASGI middleware in front of vLLM's application."""

    def __init__(self, app: Any):
        self._app = app
        self._weights = ServerWeights()
        self._load = ServerLoad()
        self._start_id = uuid.uuid4().hex
        self._adapters = tempfile.TemporaryDirectory(prefix="groupgrad-adapters-")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer groupgrad's routes; refuse vLLM's own POST routes while weights are incomplete."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].startswith(PREFIX):
            await self._answer(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif not self._weights.is_complete:
            await _reply(503, {"error": str(self._weights.not_complete())}, send)
        elif self._weights.push_is_waiting:
            # New calls could keep a push waiting for ever.
            await _reply(503, {"error": "a push of weights waits for rows to end; ask again in a moment"}, send)
        else:
            self._load.num_sampling += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._load.num_sampling -= 1

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        request = Request(scope, receive)
        engine = scope["app"].state.engine_client
        route = scope["path"].removeprefix(PREFIX).strip("/")
        handler = getattr(self, f"route_{route}", None)
        try:
            if route in WORKER_ROUTES:
                async with self._weights.lock:
                    workers = engine.collective_rpc(f"groupgrad_{route}", kwargs=await request.json())
                    status, answer = 200, {"workers": await workers}
            elif handler is not None:
                status, answer = 200, await handler(engine, request)
            else:
                raise Refusal(404, f"there is no route {scope['path']}")
        except Refusal as refusal:
            status, answer = refusal.status, {"error": str(refusal)}
        except Exception as error:  # vLLM's own failures, reported to the trainer as they are
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        if isinstance(answer, RowStream):
            await _stream(answer, scope, receive, send)
        else:
            await _reply(status, answer or {}, send)

    async def route_info(self, engine: Any, request: Any) -> dict[str, Any]:
        if engine.errored:
            raise Refusal(503, "the engine of this server has died; the server is about to end")
        config = engine.model_config
        lora = getattr(engine.vllm_config, "lora_config", None)
        weights = self._weights
        return {
            "start_id": self._start_id,
            "protocol": PROTOCOL,
            "release": __version__,
            "process": os.getpid(),
            "vllm": _vllm_version(),
            "model": config.model,
            "sizes": model_sizes(config.hf_config),
            "vocab_size": config.get_vocab_size(),
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "max_lora_rank": 0 if lora is None else int(lora.max_lora_rank),
            "quantization": config.quantization,
            "logprobs_mode": str(config.logprobs_mode),
            "weight_version": weights.version,
            "base_version": weights.base_version,
            "complete": weights.is_complete,
            "pending_version": weights.pending_version,
            "num_sampling": self._load.num_sampling,
            "push_is_waiting": weights.push_is_waiting,
        }

    async def route_check(self, engine: Any, request: Any) -> None:
        with _refused_options():
            params = sampling_params((await request.json())["sampling"], {"seed": 0, "max_tokens": 1})
            await asyncio.to_thread(verify, params, engine)  # a regex may take a while

    async def route_generate(self, engine: Any, request: Any) -> RowStream:
        """Start the rows."""
        body, weights = await request.json(), self._weights
        # Nothing is awaited from here on: no push can begin between the check of the version and the rows' start.
        if not weights.is_complete:
            raise weights.not_complete()
        if weights.version != body["weight_version"]:
            raise Refusal(409, f"this server has the weights {weights.version!r}, not {body['weight_version']!r}")
        with _refused_options():
            return RowStream(engine, body, weights.adapter, self._load)

    async def route_begin(self, engine: Any, request: Any) -> None:
        body = await request.json()
        weights = self._weights
        async with weights.lock:
            await self._drain(float(body["timeout_s"]))
            weights.begin(str(body["weight_version"]))
            weights.adapter = None
            await engine.collective_rpc("groupgrad_begin", args=(body["tensors"],))

    async def route_bucket(self, engine: Any, request: Any) -> None:
        query, body = dict(request.query_params), await request.body()
        async with self._weights.lock:
            self._check_pending(query["weight_version"])
            with _refused_as(GROUP_LEFT_STATUS, OTHER_GROUP):  # another trainer may have met the workers meanwhile
                await engine.collective_rpc("groupgrad_bucket", args=(body, query))

    async def route_commit(self, engine: Any, request: Any) -> None:
        body = await request.json()
        weights, version = self._weights, body["weight_version"]
        async with weights.lock:
            self._check_pending(version)
            with _refused_as(422, REFUSED):
                await engine.collective_rpc("groupgrad_commit", args=(int(body["checksum"]),))
            weights.base_version = version
            await self._finish_push(engine, version)

    def _check_pending(self, version: str) -> None:
        if self._weights.is_complete or self._weights.pending_version != version:
            raise Refusal(409, f"the push {version!r} is not under way on this server")

    async def route_adapter(self, engine: Any, request: Any) -> None:
        """Load an adapter; the body is its configuration (`config_bytes` long), then its tensors."""
        query, data = request.query_params, await request.body()
        version, config_bytes = query["weight_version"], int(query["config_bytes"])
        if zlib.crc32(data) != int(query["checksum"]):
            raise Refusal(422, f"the adapter {version!r} arrived with another checksum than it was sent with")
        weights = self._weights
        async with weights.lock:
            await self._drain(float(query["timeout_s"]))
            if weights.base_version != query["base_version"]:
                raise Refusal(
                    409,
                    f"the adapter {version!r} belongs to other weights than {weights.base_version!r}, which are here",
                )
            weights.num_adapters += 1
            contents = data[:config_bytes], data[config_bytes:]
            adapter = lora_request(version, weights.num_adapters, self._adapters.name, *contents)
            previous = weights.adapter
            weights.begin(version)
            if not await engine.add_lora(adapter):
                raise Refusal(422, f"vLLM did not load the adapter {version!r}")
            if previous is not None:
                await engine.remove_lora(previous.lora_int_id)
                shutil.rmtree(previous.lora_path, ignore_errors=True)
            weights.adapter = adapter
            await self._finish_push(engine, version)

    async def _drain(self, timeout_s: float) -> None:
        """Wait until nothing is sampled; vLLM's own routes refuse new calls meanwhile."""
        weights, loop = self._weights, asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        weights.push_is_waiting = True
        try:
            while num_sampling := self._load.num_sampling:
                if loop.time() > deadline:
                    raise Refusal(409, f"{num_sampling} rows still sample after {timeout_s:g} s; weights cannot change")
                await asyncio.sleep(0.01)
        finally:
            weights.push_is_waiting = False

    async def _finish_push(self, engine: Any, version: str) -> None:
        """Drop everything computed with earlier weights, and let sampling begin with those of the push."""
        if not await engine.reset_prefix_cache():
            raise Refusal(500, f"vLLM did not forget what it computed with the weights before {version!r}")
        # Image features have a cache of their own.
        await engine.reset_encoder_cache()
        await engine.update_weight_version(version)
        self._weights.version, self._weights.is_complete, self._weights.pending_version = version, True, None


@contextmanager
def _refused_options() -> Iterator[None]:
    """Turn a ValueError about sampling options into a refusal."""
    try:
        yield
    except ValueError as error:
        raise Refusal(400, f"vLLM {_vllm_version()} refuses the sampling options: {error}") from None


@contextmanager
def _refused_as(status: int, words: str) -> Iterator[None]:
    """Turn a worker's error with these words, which vLLM wraps in others, into a refusal of that status."""
    try:
        yield
    except Exception as error:
        if words in str(error):
            raise Refusal(status, str(error)) from None
        raise


def _vllm_version() -> str:
    return compat.installed_version("vllm") or "of unknown version"


async def _stream(rows: RowStream, scope: Any, receive: Any, send: Any) -> None:
    """Send the rows' lines; rows are aborted when the caller disconnects."""
    from starlette.responses import StreamingResponse

    try:
        await StreamingResponse(rows.lines(), media_type="application/x-ndjson")(scope, receive, send)
    except OSError:
        logger.info("a trainer went away while its rows were sampled")
    finally:
        rows.abort()


async def _reply(status: int, answer: dict[str, Any], send: Any) -> None:
    data = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(RETRY_S).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def server_command(arguments: list[str]) -> list[str]:
    """vLLM's command line for a server with groupgrad's routes and workers."""
    return ["serve", *arguments, "--worker-extension-cls", EXTENSION, "--middleware", MIDDLEWARE]
