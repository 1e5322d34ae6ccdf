"""Routes that groupgrad adds to vLLM's server: verified pushes of weights, and sampling from a named weight version.

vLLM's server loads `Routes` (`--middleware`) in front of its own routes. They are:

- GET `/groupgrad/info`: the model, this start of the server, and its weights.
- POST `/groupgrad/check`: reject sampling options that vLLM refuses.
- POST `/groupgrad/generate`: rows in, a line of JSON for each row as it ends, and a heartbeat while tokens come.
- POST `/groupgrad/init`: a trainer meets the workers.
- POST `/groupgrad/start`, `/groupgrad/update`, `/groupgrad/finish`: a push of weights, a bucket for each `update`.
- POST `/groupgrad/adapter`: a push of an adapter.

The routes of a push call the methods of vLLM's weight transfer. vLLM's own routes to them ask for no key, exist in its
development mode alone, and check nothing (docs/vllm.md).

A push, phase by phase:

    trainer (`client.py`)           server (here)                            workers (`weight_receiver.py`)
    start: names of all tensors     pauses sampling, marks incomplete        expect a push
    update: a bucket of tensors     only the next ones announced are taken   load it, add to their checksum
    finish: the checksum            only if all tensors came                 compare the checksum and the names
                                    then the new version, and sampling

Every route, vLLM's own included, needs the key (`http.py`); without it only GET `/health` is answered.

Weights are *complete* when a whole push has arrived and was verified. Until then no route samples: after a push that
broke off, the server refuses to sample until another push has ended. A push first pauses vLLM, which ends the rows
under way, or with `keeps_rows` stops them where they are: these, and rows that arrive meanwhile, go on with the new
weights.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import uuid
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from groupgrad import compat
from groupgrad._version import __version__
from groupgrad.integrations.vllm.http import MISSING_KEY_STATUS, VARIABLE, check_key
from groupgrad.integrations.vllm.media import check_prompt, decode, vllm_prompt
from groupgrad.integrations.vllm.serve_command import check_mode
from groupgrad.integrations.vllm.vllm_params import (
    check_options,
    lora_request,
    sampled_logprobs,
    sampling_params,
    version_counts,
)
from groupgrad.integrations.vllm.weight_receiver import Rendezvous
from groupgrad.integrations.vllm.wire import (
    AS_LOADED,
    PROTOCOL,
    TensorSpec,
    model_sizes,
    specs_from_json,
    specs_to_json,
)

HEARTBEAT_S = 1.0
"""Seconds between heartbeat lines while tokens are sampled and no row ends."""


@dataclass(slots=True)
class ServerLoad:
    """Counters of the work of a whole server."""

    num_tokens: int = 0
    """Tokens sampled for rows since the server started."""


class RowStream:
    """The rows of one `generate` call; each is sampled independently, from its own seed, from construction on.

    `body` has `sampling`, `prompts` (lists of ids) and `rows`, each with `row` (its name in the answer), `prompt`
    (index into `prompts`), `seed`, `max_tokens`, and with images `images`, a key of the body's `images`, which holds
    lists of them. `weight_version` is that of the weights at the start: only rows that start with the same
    weights share keys and values. `weights` has the present `version` and `adapter`. `load` counts over all calls,
    since a row may have to wait for those of another rank.
    ValueError if vLLM refuses the options; LookupError or TypeError for a body without these fields.
    """

    def __init__(self, engine: Any, body: dict[str, Any], weight_version: str, weights: Any, load: ServerLoad):
        from vllm.sampling_params import RequestOutputKind

        self._engine, self._weights, self._load = engine, weights, load
        self._weight_version = weight_version
        self._lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        rows = []
        for row in body["rows"]:
            row_fields = {"seed": row["seed"], "max_tokens": row["max_tokens"]}
            params = sampling_params(body["sampling"], row_fields, output_kind=RequestOutputKind.DELTA)
            images = body["images"][row["images"]] if "images" in row else ()
            rows.append((row["row"], body["prompts"][row["prompt"]], images, params))
        self._tasks = [asyncio.create_task(self._sample(*row)) for row in rows]

    async def lines(self) -> AsyncIterator[bytes]:
        """One line of JSON for each ended row: `ids`, `logprobs`, `finish_reason` and `weight_versions`, or an `error`.

        `weight_versions` are pairs of a version and the number of consecutive tokens that its weights have sampled.
        Empty objects in between say that the server has sampled tokens; where nothing is sampled, nothing is said.
        """
        num_left, num_tokens = len(self._tasks), self._load.num_tokens
        while num_left:
            try:
                line = await asyncio.wait_for(self._lines.get(), HEARTBEAT_S)
                num_left -= 1
            except asyncio.TimeoutError:
                if self._load.num_tokens == num_tokens:
                    continue
                line, num_tokens = {}, self._load.num_tokens
            yield json.dumps(line).encode() + b"\n"

    def abort(self) -> None:
        """Stops sampling the rows that have not ended."""
        for task in self._tasks:
            task.cancel()

    async def _sample(self, row: int, prompt: list[int], images: Sequence[Any], params: Any) -> None:
        line: dict[str, Any] = {"row": row}
        ids: list[int] = []
        logprobs: list[float] = []
        spans: Any = ()
        try:
            outputs = self._engine.generate(
                {**vllm_prompt(prompt, images, self._engine), "cache_salt": self._weight_version},
                params,
                f"groupgrad-{uuid.uuid4().hex}",  # vLLM keys its answers by request id, so ids must be unique
                lora_request=self._weights.adapter,
            )
            async for output in outputs:
                if images:
                    check_prompt(prompt, output.prompt_token_ids)
                part = output.outputs[0]
                ids.extend(part.token_ids)
                logprobs.extend(sampled_logprobs(part.token_ids, part.logprobs if part.token_ids else []))
                self._load.num_tokens += len(part.token_ids)
                line["finish_reason"] = part.finish_reason
                # vLLM's own record, at the end of a row; a row without tokens has none.
                spans = getattr(part, "weight_versions", None) or ()
            line |= {"ids": ids, "logprobs": logprobs, "weight_versions": version_counts(spans, len(ids))}
        except Exception as error:  # reported to the trainer, as the failure of this row alone
            line["error"] = f"{type(error).__name__}: {error}"
        self._lines.put_nowait(line)


PREFIX = "/groupgrad/"
OPEN_PATH = "/health"
"""The only path that is answered without the key."""

RETRY_S = 1
"""Seconds after which a caller that was refused during a push may retry."""


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
    is_ending_rows: bool = False
    """True while a push waits for rows under way to end; a new one would be held back, and begin with other weights."""
    is_complete: bool = True
    """False from the start of a push until one has been verified."""
    pending_version: str | None = None
    """Weight version of the push under way, or of the last that broke off."""
    adapter: Any = None
    """vLLM's request for the adapter that rows are sampled with."""
    num_adapters: int = 0
    """Adapters pushed since the start."""
    specs: Sequence[TensorSpec] = ()
    """Tensors that the push under way has announced."""
    num_tensors: int = 0
    """Number of announced tensors that the workers have received."""
    keeps_rows: bool = False
    """True if the push under way, or the last one, keeps rows that have not ended."""
    outlived: set[str] = field(default_factory=set)
    """Weight versions before the last pushes that kept rows; rows that name one go on with the present weights."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_paused(self) -> bool:
        """True from the start of a push that keeps rows until a push has been verified; rows end after that alone."""
        return self.keeps_rows and not self.is_complete

    def not_complete(self) -> Refusal:
        """Refuses to sample before a push has ended."""
        return Refusal(
            503, f"the push {self.pending_version!r} of weights has not ended; nothing is sampled until one has"
        )

    def begin(self, version: str, specs: Sequence[TensorSpec] = (), *, keeps_rows: bool = False) -> None:
        """Marks the weights incomplete until the push of these tensors ends."""
        self.is_ending_rows, self.is_complete, self.pending_version = False, False, version
        self.specs, self.num_tensors, self.keeps_rows = specs, 0, keeps_rows
        self.outlived = {*self.outlived, self.version} if keeps_rows else set()

    def check_pending(self, version: str) -> None:
        """Refuses a part of another push than the one under way."""
        if self.is_complete or self.pending_version != version:
            raise Refusal(409, f"the push {version!r} is not under way on this server")

    def next_bucket(self, first: int, count: int) -> Sequence[TensorSpec]:
        """Tensors of this bucket, which have to be the next ones of the push."""
        if first != self.num_tensors or not 0 < count <= len(self.specs) - first:
            raise Refusal(
                409,
                f"a bucket has the tensors {first} to {first + count}, but {self.num_tensors} of {len(self.specs)} are "
                "here",
            )
        return self.specs[first : first + count]


class Routes:
    """ASGI middleware in front of vLLM's application."""

    def __init__(self, app: Any):
        check_mode()
        try:
            self._key = check_key(os.environ.get(VARIABLE, ""), VARIABLE).encode()
        except ValueError as error:
            raise ValueError(f"{error}; `groupgrad vllm-serve` makes a key if none is given") from None
        self._app = app
        self._weights = ServerWeights()
        self._load = ServerLoad()
        self._start_id = uuid.uuid4().hex

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers groupgrad's routes; refuses calls without the key, and vLLM's POST routes without whole weights."""
        asks_health = scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == OPEN_PATH
        if scope["type"] == "lifespan" or asks_health:
            await self._app(scope, receive, send)
        elif scope["type"] != "http":  # a websocket would sample whatever is pushed meanwhile
            await send({"type": "websocket.close", "code": 1008})
        elif not self._has_key(scope):
            story = "this server answers only with its key, as a header `Authorization: Bearer KEY`"
            await _reply(MISSING_KEY_STATUS, {"error": story}, scope, receive, send)
        elif scope["path"].startswith(PREFIX):
            await self._answer(scope, receive, send)
        elif scope["method"] == "POST" and not self._weights.is_complete:
            refusal = self._weights.not_complete()
            await _reply(refusal.status, {"error": str(refusal)}, scope, receive, send)
        else:  # one that is held back by a push meanwhile goes on with the new weights
            await self._app(scope, receive, send)

    def _has_key(self, scope: Any) -> bool:
        scheme, _, given = Request(scope).headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), self._key)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        engine = scope["app"].state.engine_client
        route = scope["path"].removeprefix(PREFIX).strip("/")
        handler = getattr(self, f"route_{route}", None)
        try:
            if handler is None:
                raise Refusal(404, f"there is no route {scope['path']}")
            status, answer = 200, await handler(engine, Request(scope, receive))
        except Refusal as refusal:
            status, answer = refusal.status, {"error": str(refusal)}
        except (LookupError, TypeError, ValueError, RecursionError) as error:  # a field that is missing, or cannot be
            status, answer = 400, {"error": f"the route {route} does not take this: {type(error).__name__}: {error}"}
        except Exception as error:  # failures in vLLM's engine, which come as plain Exceptions from its process
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        if isinstance(answer, RowStream):
            await _stream(answer, scope, receive, send)
        else:
            await _reply(status, answer or {}, scope, receive, send)

    async def route_info(self, engine: Any, request: Request) -> dict[str, Any]:
        if engine.errored:
            raise Refusal(503, "the engine of this server has died; the server is about to end")
        config, parallel = engine.model_config, engine.vllm_config.parallel_config
        lora, transfer = engine.vllm_config.lora_config, engine.vllm_config.weight_transfer_config
        weights = self._weights
        return {
            "start_id": self._start_id,
            "protocol": PROTOCOL,
            "release": __version__,
            "num_processes": getattr(parallel, "_api_process_count", 1),
            "vllm": _vllm_version(),
            "backend": None if transfer is None else transfer.backend,
            "model": config.model,
            "sizes": model_sizes(config.hf_config),
            "vocab_size": config.get_vocab_size(),
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "max_lora_rank": 0 if lora is None else int(lora.max_lora_rank),
            "num_workers": parallel.world_size_across_dp,
            "quantization": config.quantization,
            "logprobs_mode": str(config.logprobs_mode),
            "weight_version": weights.version,
            "base_version": weights.base_version,
            "complete": weights.is_complete,
            "pending_version": weights.pending_version,
        }

    async def route_check(self, engine: Any, request: Request) -> None:
        sampling = dict(await request.json())["sampling"]
        with _refused_options():
            await asyncio.to_thread(check_options, sampling, engine)  # a regex may take a while

    async def route_generate(self, engine: Any, request: Request) -> RowStream:
        """Starts the rows."""
        body, weights = dict(await request.json()), self._weights
        version = body["weight_version"]
        for key, images in body.get("images", {}).items():
            body["images"][key] = [await asyncio.to_thread(decode, image) for image in images]
        present = weights.pending_version if weights.is_paused else weights.version
        if weights.is_ending_rows or (not weights.is_complete and not weights.is_paused):
            raise weights.not_complete()
        if version != present and version not in weights.outlived:
            raise Refusal(409, f"this server has the weights {weights.version!r}, not {version!r}")
        with _refused_options():
            return RowStream(engine, body, str(present), weights, self._load)

    async def route_init(self, engine: Any, request: Request) -> None:
        """Makes all workers check the trainer's shared memory, open a port, form a process group, or only answer.

        The fields are those of `Rendezvous`, without its host: workers meet at the address of the server's own that the
        caller has reached.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        body, weights = dict(await request.json()), self._weights
        rendezvous = Rendezvous(**body, host=request.scope["server"][0] if "port" in body else "")
        async with weights.lock:
            await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=asdict(rendezvous)))

    async def route_start(self, engine: Any, request: Request) -> None:
        body, weights = dict(await request.json()), self._weights
        version, timeout_s = body["weight_version"], float(body["timeout_s"])
        specs, keeps_rows = specs_from_json(body["tensors"]), body.get("keeps_rows", False)
        async with weights.lock:
            # A push that broke off may have left rows paused. None of them ends before this push, so it keeps them too.
            keeps_rows = keeps_rows or weights.is_paused
            await self._pause(engine, version, timeout_s, keeps_rows=keeps_rows)
            await self._end_update(engine)
            weights.begin(version, specs, keeps_rows=keeps_rows)
            weights.base_version, weights.adapter = "", None  # no adapter fits weights that are half loaded
            await engine.start_weight_update()

    async def route_update(self, engine: Any, request: Request) -> None:
        query, weights = request.query_params, self._weights
        version, first, count = query["weight_version"], int(query["first"]), int(query["count"])
        async with weights.lock:
            weights.check_pending(version)
            bucket = weights.next_bucket(first, count)
            source = {"shared": query["shared"]} if "shared" in query else {}
            await self._update(engine, specs=specs_to_json(bucket), **source)
            weights.num_tensors += count

    async def route_finish(self, engine: Any, request: Request) -> None:
        body, weights = dict(await request.json()), self._weights
        version, checksum = body["weight_version"], int(body["checksum"])
        async with weights.lock:
            weights.check_pending(version)
            if weights.num_tensors != len(weights.specs):
                raise Refusal(422, f"{len(weights.specs)} tensors were announced, {weights.num_tensors} came")
            await self._update(engine, checksum=checksum)
            await engine.finish_weight_update()
            weights.base_version = version
            await self._finish_push(engine, version)

    async def _update(self, engine: Any, **update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await engine.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def _end_update(self, engine: Any) -> None:
        """Ends an update that was started and not finished: vLLM refuses another, and ends it at an error alone."""
        if not self._weights.is_complete:
            with suppress(Exception):
                await self._update(engine)

    async def route_adapter(self, engine: Any, request: Request) -> None:
        """Loads an adapter; the body is its configuration (`config_bytes` long), then its tensors."""
        query = request.query_params
        version, base_version, timeout_s = query["weight_version"], query["base_version"], float(query["timeout_s"])
        config_bytes, checksum = int(query["config_bytes"]), int(query["checksum"])
        data = await request.body()
        if zlib.crc32(data) != checksum:
            raise Refusal(422, f"the adapter {version!r} arrived with another checksum than it was sent with")
        weights = self._weights
        async with weights.lock:
            if weights.base_version != base_version:
                raise Refusal(
                    409,
                    f"the adapter {version!r} belongs to other weights than {weights.base_version!r}, which are here",
                )
            await self._pause(engine, version, timeout_s)
            weights.num_adapters += 1
            previous = weights.adapter
            weights.begin(version)
            with lora_request(version, weights.num_adapters, data[:config_bytes], data[config_bytes:]) as adapter:
                if not await engine.add_lora(adapter):
                    raise Refusal(422, f"vLLM did not load the adapter {version!r}")
            if previous is not None:
                await engine.remove_lora(previous.lora_int_id)
            weights.adapter = adapter
            await self._finish_push(engine, version)

    async def _pause(self, engine: Any, version: str, timeout_s: float, *, keeps_rows: bool = False) -> None:
        """Returns when nothing is sampled, with rows under way ended, or kept where they are, keys and values too."""
        if not keeps_rows:
            self._weights.is_ending_rows, self._weights.pending_version = True, version
        try:
            pause = engine.pause_generation(mode="keep" if keeps_rows else "wait", clear_cache=False)
            await asyncio.wait_for(pause, timeout_s)
        except asyncio.TimeoutError:
            self._weights.is_ending_rows = False
            # vLLM takes calls in order: it resumes as soon as it comes to the pause.
            self._resuming = asyncio.create_task(engine.resume_generation())
            raise Refusal(409, f"vLLM did not pause within {timeout_s:g} s; weights cannot change") from None

    async def _finish_push(self, engine: Any, version: str) -> None:
        """Lets sampling begin, or go on, with the weights of the push, and with nothing computed from earlier ones.

        Rows that are kept are the exception: their keys and values stay, out of reach of other rows (`RowStream`).
        """
        weights = self._weights
        if not weights.keeps_rows:
            if not await engine.reset_prefix_cache():
                raise Refusal(500, f"vLLM did not forget what it computed with the weights before {version!r}")
            # Image features have a cache of their own.
            await engine.reset_encoder_cache()
        await engine.update_weight_version(version)
        weights.version, weights.is_complete, weights.pending_version = version, True, None
        await engine.resume_generation()


@contextmanager
def _refused_options() -> Iterator[None]:
    """Turns a ValueError about sampling options into a refusal."""
    try:
        yield
    except ValueError as error:
        raise Refusal(400, f"vLLM {_vllm_version()} refuses the sampling options: {error}") from None


def _vllm_version() -> str:
    return compat.installed_version("vllm") or "of unknown version"


async def _stream(rows: RowStream, scope: Any, receive: Any, send: Any) -> None:
    """Sends the rows' lines; rows are aborted when the caller disconnects."""
    try:
        with suppress(OSError):  # the caller went away
            await StreamingResponse(rows.lines(), media_type="application/x-ndjson")(scope, receive, send)
    finally:
        rows.abort()


async def _reply(status: int, answer: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
    """Answers with JSON; without the key the connection ends, and the body is not read."""
    headers = {"retry-after": str(RETRY_S)} if status == 503 else {}
    if status == MISSING_KEY_STATUS:
        headers["connection"] = "close"
    await JSONResponse(answer, status, headers)(scope, receive, send)
