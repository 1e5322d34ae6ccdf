"""What groupgrad adds to vLLM's own server: weights that are pushed and verified, and rows that say which they had.

vLLM's server loads `Routes` (`--middleware`) in front of its own routes. They are:

- GET `/groupgrad/info`: what is served, by which start of the server, with which weights.
- POST `/groupgrad/check`: whether sampling options can work.
- POST `/groupgrad/generate`: rows in, a line of JSON for each row as it ends, and one every second to show life.
- POST `/groupgrad/reads`: whether the workers see this machine's shared memory.
- GET `/groupgrad/devices`; POST `/groupgrad/open`, `/groupgrad/join`, `/groupgrad/leave`: a process group of the
  trainer and all workers, over which buckets may come.
- POST `/groupgrad/begin`, `/groupgrad/bucket`, `/groupgrad/commit`: a push of weights.
- POST `/groupgrad/adapter`: a push of an adapter.

Weights are *whole* when all of a push has arrived and was verified. While they are not, nothing is sampled, by no
route: a push that never ends leaves a server that refuses to sample until another push has ended. A push first waits
for what is being sampled; vLLM's own routes begin nothing new from then on, and say when to ask again.
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
from pathlib import Path
from typing import Any

from groupgrad import compat
from groupgrad.engines.vllm.http import LEFT
from groupgrad.engines.vllm.row_stream import RowStream, TokenCount
from groupgrad.engines.vllm.vllm_params import sampling_params, verify
from groupgrad.engines.vllm.wire import model_sizes
from groupgrad.engines.vllm.worker import EXTENSION, OTHER_GROUP, REFUSED

logger = logging.getLogger(__name__)

MIDDLEWARE = "groupgrad.engines.vllm.server.Routes"
PREFIX = "/groupgrad/"
RETRY_S = 1
"""Seconds after which whoever is refused for a push may ask again, as it is told."""
AS_LOADED = "as loaded"
"""The weight_version of the weights that the server read from disk when it started."""


class Refusal(Exception):
    """A request that cannot be answered: the status, and why."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(slots=True)
class Weights:
    """Which weights the server has."""

    weight_version: str = AS_LOADED
    """Of the last push that was verified."""
    base: str = AS_LOADED
    """Of the last push of weights that was verified, whatever adapters came after it."""
    whole: bool = True
    """False from the beginning of a push until one has been verified."""
    pushing: str | None = None
    """Stamp of the push under way, or of the last that did not end."""
    tensors: int = 0
    """Announced for that push."""
    adapter: Any = None
    """vLLM's request for the adapter that rows are sampled with."""
    num_adapters: int = 0
    """Adapters pushed since the start; vLLM wants a new number for each."""
    num_sampling: int = 0
    """Rows, and calls of vLLM's own routes, that are being sampled."""
    is_awaited: bool = False
    """A push waits until nothing is sampled."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Routes:
    """ASGI middleware in front of vLLM's application."""

    def __init__(self, app: Any):
        self._app = app
        self._weights = Weights()
        self._tokens = TokenCount()
        self._start_id = uuid.uuid4().hex
        self._adapters = tempfile.TemporaryDirectory(prefix="groupgrad-adapters-")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer our own routes; hold back whatever else would sample from weights that are not whole."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].startswith(PREFIX):
            await self._answer(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif not self._weights.whole:
            await _reply(503, {"error": self._not_whole()}, send)
        elif self._weights.is_awaited:
            # More of these could keep a push waiting for ever.
            await _reply(503, {"error": "a push of weights waits for rows to end; ask again in a moment"}, send)
        else:
            self._count(1)
            try:
                await self._app(scope, receive, send)
            finally:
                self._count(-1)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        request = Request(scope, receive)
        engine = scope["app"].state.engine_client
        handlers = {
            "info": self._info,
            "check": self._check,
            "reads": self._reads,
            "devices": self._devices,
            "open": self._open,
            "join": self._join,
            "leave": self._leave,
            "begin": self._begin,
            "bucket": self._bucket,
            "commit": self._commit,
            "adapter": self._adapter,
        }
        name = scope["path"].removeprefix(PREFIX).strip("/")
        try:
            if name == "generate":
                rows = self._generate(engine, await request.json())
                await _stream(rows, scope, receive, send)
                return
            if name not in handlers:
                raise Refusal(404, f"there is no route {scope['path']}")
            status, answer = 200, await handlers[name](engine, request)
        except Refusal as refusal:
            status, answer = refusal.status, {"error": str(refusal)}
        except Exception as error:  # vLLM's own failures, told to the trainer as they are
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        await _reply(status, answer, send)

    async def _info(self, engine: Any, request: Any) -> dict[str, Any]:
        if engine.errored:
            raise Refusal(503, "the engine of this server has died; the server is about to end")
        config = engine.model_config
        weights = self._weights
        return {
            "start_id": self._start_id,
            "process": os.getpid(),
            "vllm": _vllm_version(),
            "model": config.model,
            "sizes": model_sizes(config.hf_config),
            "vocab_size": config.get_vocab_size(),
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "max_lora_rank": _max_lora_rank(engine),
            "quantization": config.quantization,
            "logprobs_mode": str(config.logprobs_mode),
            "weight_version": weights.weight_version,
            "base": weights.base,
            "whole": weights.whole,
            "pushing": weights.pushing,
            "num_sampling": weights.num_sampling,
            "is_awaited": weights.is_awaited,
        }

    async def _check(self, engine: Any, request: Any) -> dict[str, Any]:
        try:
            params = sampling_params((await request.json())["sampling"], {"seed": 0, "max_tokens": 1})
            await asyncio.to_thread(verify, params, engine)  # a regex may take a while
        except ValueError as error:
            raise Refusal(400, f"vLLM {_vllm_version()} refuses the sampling options: {error}") from None
        return {}

    def _generate(self, engine: Any, body: dict[str, Any]) -> RowStream:
        """No other call comes between the look at the weight_version and the rows' start: a push that begins waits for them."""
        self._expect(body["weight_version"])
        try:
            return RowStream(engine, body, self._weights.adapter, self._count, self._tokens)
        except ValueError as error:
            raise Refusal(400, f"vLLM {_vllm_version()} refuses the sampling options: {error}") from None

    def _count(self, change: int) -> None:
        self._weights.num_sampling += change

    def _expect(self, weight_version: str) -> None:
        weights = self._weights
        if not weights.whole:
            raise Refusal(503, self._not_whole())
        if weights.weight_version != weight_version:
            raise Refusal(409, f"this server has the weights {weights.weight_version!r}, not {weight_version!r}")

    def _not_whole(self) -> str:
        return f"the push {self._weights.pushing!r} of weights has not ended; nothing is sampled until one has"

    async def _begin(self, engine: Any, request: Any) -> dict[str, Any]:
        body = await request.json()
        weights = self._weights
        async with weights.lock:
            await self._drained(float(body["timeout_s"]))
            weights.whole, weights.pushing, weights.adapter = False, str(body["weight_version"]), None
            weights.tensors = len(body["tensors"])
            await engine.collective_rpc("groupgrad_begin", args=(body["tensors"],))
        return {}

    async def _bucket(self, engine: Any, request: Any) -> dict[str, Any]:
        query = request.query_params
        data = await request.body()
        async with self._weights.lock:
            self._expect_push(query["weight_version"])
            places = int(query["first"]), int(query["count"])
            if "group" in query:
                sent = query["group"], int(query["num_bytes"])
                # Another trainer may have met the workers meanwhile.
                with _refused_as(LEFT, OTHER_GROUP):
                    await engine.collective_rpc("groupgrad_received", args=(*sent, *places))
            elif "shared" in query:
                await engine.collective_rpc("groupgrad_shared", args=(query["shared"], *places))
            else:
                await engine.collective_rpc("groupgrad_bucket", args=(data, *places))
        return {}

    async def _reads(self, engine: Any, request: Any) -> dict[str, Any]:
        name = (await request.json())["shared"]
        return {"reads": all(await engine.collective_rpc("groupgrad_reads", args=(name,)))}

    async def _devices(self, engine: Any, request: Any) -> dict[str, Any]:
        return {"workers": await engine.collective_rpc("groupgrad_device")}

    async def _open(self, engine: Any, request: Any) -> dict[str, Any]:
        body = await request.json()
        async with self._weights.lock:
            await engine.collective_rpc("groupgrad_open", args=(int(body["port"]), float(body["timeout_s"])))
        return {}

    async def _join(self, engine: Any, request: Any) -> dict[str, Any]:
        body = await request.json()
        numbers = int(body["port"]), int(body["size"]), float(body["timeout_s"])
        arguments = (body["name"], body["backend"], body["host"], *numbers)
        async with self._weights.lock:
            await engine.collective_rpc("groupgrad_join", args=arguments)
        return {}

    async def _leave(self, engine: Any, request: Any) -> dict[str, Any]:
        async with self._weights.lock:
            await engine.collective_rpc("groupgrad_leave", args=(request.query_params["group"],))
        return {}

    async def _commit(self, engine: Any, request: Any) -> dict[str, Any]:
        body = await request.json()
        weights = self._weights
        async with weights.lock:
            self._expect_push(body["weight_version"])
            arguments = (weights.tensors, int(body["checksum"]))
            with _refused_as(422, REFUSED):
                await engine.collective_rpc("groupgrad_commit", args=arguments)
            weights.base = body["weight_version"]
            await self._become(engine, body["weight_version"])
        return {"weight_version": weights.weight_version}

    def _expect_push(self, weight_version: str) -> None:
        if self._weights.whole or self._weights.pushing != weight_version:
            raise Refusal(409, f"the push {weight_version!r} is not under way on this server")

    async def _adapter(self, engine: Any, request: Any) -> dict[str, Any]:
        """Files come as one body: the length of the configuration, the configuration, the tensors."""
        from vllm.lora.request import LoRARequest

        weight_version, checksum = request.query_params["weight_version"], int(request.query_params["checksum"])
        size = int(request.query_params["config_bytes"])
        data = await request.body()
        if zlib.crc32(data) != checksum:
            raise Refusal(422, f"the adapter {weight_version!r} arrived with another checksum than it was sent with")
        weights = self._weights
        async with weights.lock:
            await self._drained(float(request.query_params["timeout_s"]))
            if weights.base != request.query_params["base"]:
                raise Refusal(
                    409,
                    f"the adapter {weight_version!r} belongs to other weights than {weights.base!r}, which are here",
                )
            folder = Path(self._adapters.name) / str(weights.num_adapters)
            folder.mkdir()
            (folder / "adapter_config.json").write_bytes(data[:size])
            (folder / "adapter_model.safetensors").write_bytes(data[size:])
            weights.num_adapters += 1
            adapter = LoRARequest(weight_version, weights.num_adapters, str(folder))
            before, weights.whole, weights.pushing = weights.adapter, False, weight_version
            if not await engine.add_lora(adapter):
                raise Refusal(422, f"vLLM did not load the adapter {weight_version!r}")
            if before is not None:
                await engine.remove_lora(before.lora_int_id)
                shutil.rmtree(before.lora_path, ignore_errors=True)
            weights.adapter = adapter
            await self._become(engine, weight_version)
        return {"weight_version": weight_version}

    async def _drained(self, timeout_s: float) -> None:
        """Wait until nothing is sampled; vLLM's own routes begin nothing new meanwhile."""
        weights = self._weights
        deadline = asyncio.get_running_loop().time() + timeout_s
        weights.is_awaited = True
        try:
            while weights.num_sampling:
                if asyncio.get_running_loop().time() > deadline:
                    raise Refusal(
                        409, f"{weights.num_sampling} rows still sample after {timeout_s:g} s; weights cannot change"
                    )
                await asyncio.sleep(0.01)
        finally:
            weights.is_awaited = False

    async def _become(self, engine: Any, weight_version: str) -> None:
        """From here on the weights are those of the push. What was computed with others is forgotten."""
        if not await engine.reset_prefix_cache():
            raise Refusal(500, f"vLLM did not forget what it computed with the weights before {weight_version!r}")
        # What it saw in images is kept by another name.
        await engine.reset_encoder_cache()
        if hasattr(engine, "update_weight_version"):
            await engine.update_weight_version(weight_version)
        self._weights.weight_version, self._weights.whole, self._weights.pushing = weight_version, True, None


@contextmanager
def _refused_as(status: int, words: str) -> Iterator[None]:
    """What a worker raises inside with these words, which vLLM wraps in others, is a refusal of that status."""
    try:
        yield
    except Exception as error:
        if words in str(error):
            raise Refusal(status, str(error)) from None
        raise


def _max_lora_rank(engine: Any) -> int:
    """The largest rank of an adapter that fits; 0 if the server takes none."""
    lora = getattr(engine.vllm_config, "lora_config", None)
    return 0 if lora is None else int(lora.max_lora_rank)


def _vllm_version() -> str:
    return compat.installed_version("vllm") or "of unknown version"


async def _stream(rows: RowStream, scope: Any, receive: Any, send: Any) -> None:
    """Send the rows' lines; when who asked for them is gone, so are they."""
    from starlette.responses import StreamingResponse

    try:
        await StreamingResponse(rows.lines(), media_type="application/x-ndjson")(scope, receive, send)
    except OSError:
        logger.info("a trainer went away while its rows were sampled")
    finally:
        rows.give_up()


async def _reply(status: int, answer: dict[str, Any], send: Any) -> None:
    data = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(RETRY_S).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def server_command(arguments: list[str]) -> list[str]:
    """vLLM's own command line: `arguments` as they are, with what groupgrad adds."""
    return [
        "serve",
        *arguments,
        "--worker-extension-cls",
        EXTENSION,
        "--middleware",
        MIDDLEWARE,
    ]
