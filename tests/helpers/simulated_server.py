"""A vLLM server without vLLM: groupgrad's routes over HTTP, in front of a worker that holds a small model's weights.

Tokens are a function of the weights, the prompt and the row's seed, so servers with the same weights agree.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from waiting import free_port, until

from groupgrad.integrations.vllm.http import Address
from groupgrad.integrations.vllm.server import Routes
from groupgrad.integrations.vllm.server_pool import VLLMServerPool
from groupgrad.integrations.vllm.weight_receiver import WeightReceiver
from groupgrad.integrations.vllm.wire import BACKEND

KEY = "the-key-of-these-tests"


class Model:
    """A dict of tensors, written in place as vLLM's are."""

    def __init__(self, model: Any):
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        self.named_parameters = self.weights.items

    def named_modules(self) -> list[tuple[str, Any]]:
        return []

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)
            names.add(name)
        return names

    @property
    def digest(self) -> int:
        """Of all weights."""
        value = 0
        for tensor in self.weights.values():
            value = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, value)
        return value


class Receiver(WeightReceiver):
    """The backend with the attributes that vLLM gives it."""

    device, model_config = torch.device("cpu"), None
    parallel_config = SimpleNamespace(rank=0, world_size=1, data_parallel_index=0, world_size_across_dp=1)

    def __init__(self, model: Any):
        self.model = model


class Worker:
    """In place of vLLM's worker, with its rules for updates of weights. While `is_hung` it answers nothing."""

    def __init__(self, receiver: WeightReceiver):
        self.receiver, self.is_active = receiver, False
        self.is_hung = threading.Event()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.receiver.init_transfer_engine(self.receiver.init_info_cls(**init_info))

    def start_weight_update(self) -> None:
        if self.is_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.receiver.start_weight_update()
        self.is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self.is_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.receiver.update_weights(update_info)
        except BaseException:
            self.is_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self.is_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.receiver.finish_weight_update()
        self.is_active = False


class Weights:
    """The part of vLLM's engine that transfers weights, with one worker, whose errors it wraps as vLLM does."""

    def __init__(self, receiver: WeightReceiver):
        self.worker, self.version = Worker(receiver), "default"
        self.may_sample, self.may_begin, self.num_resets = threading.Event(), threading.Event(), 0
        self.may_sample.set()
        self.may_begin.set()
        self.num_running = 0

    async def _call(self, name: str, **arguments: Any) -> None:
        while self.worker.is_hung.is_set():
            await asyncio.sleep(0.01)
        try:
            await asyncio.to_thread(getattr(self.worker, name), **arguments)
        except Exception as error:
            raise Exception(f"Call to {name} method failed: {error}") from None

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._call("init_weight_transfer_engine", init_info=request.init_info)

    async def start_weight_update(self) -> None:
        await self._call("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self._call("update_weights", update_info=request.update_info)

    async def finish_weight_update(self) -> None:
        await self._call("finish_weight_update")

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert not clear_cache
        if mode == "keep":
            self.may_sample.clear()
            return
        assert mode == "wait"
        self.may_begin.clear()
        while self.num_running:
            await asyncio.sleep(0.005)

    async def resume_generation(self) -> None:
        self.may_sample.set()
        self.may_begin.set()

    async def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return True

    async def reset_encoder_cache(self) -> None:
        pass


class Engine(Weights):
    """In place of vLLM's engine; a token takes `token_s` seconds."""

    errored = False
    input_processor = SimpleNamespace(
        model_config=None, speculative_config=None, structured_outputs_config=None, tokenizer=None
    )
    vllm_config = SimpleNamespace(lora_config=None, parallel_config=Receiver.parallel_config)
    vllm_config.weight_transfer_config = SimpleNamespace(backend=BACKEND)

    def __init__(self, model: Any, dtype: str):
        self.model, self.token_s = Model(model), 0.0
        super().__init__(Receiver(self.model))
        config = SimpleNamespace(architectures=[type(model).__name__], get_text_config=model.config.get_text_config)
        vocab_size = model.config.vocab_size
        self.model_config = SimpleNamespace(
            model="simulated", hf_config=config, get_vocab_size=lambda: vocab_size, dtype=dtype, max_model_len=64
        )
        self.model_config.quantization, self.model_config.logprobs_mode = None, "processed_logprobs"
        self.sampled: list[int] = []
        """The seeds of the rows that ended here."""
        self.salts: dict[int, str] = {}
        """The salt of each row's keys and values, by the row's seed."""

    def token(self, prompt: list[int], seed: int, number: int) -> int:
        """A row's token at this place, by the present weights."""
        return random.Random(f"{self.model.digest} {prompt} {seed} {number}").randrange(4, 90)

    async def generate(self, prompt: Any, params: Any, name: str, *, lora_request: Any) -> AsyncIterator[Any]:
        self.salts[params.seed] = prompt["cache_salt"]
        while not self.may_begin.is_set():
            await asyncio.sleep(0.005)
        self.num_running += 1
        spans: list[Any] = []
        try:
            for number in range(params.max_tokens):
                await asyncio.sleep(self.token_s)
                while self.worker.is_hung.is_set() or not self.may_sample.is_set():
                    await asyncio.sleep(0.01)
                token = self.token(prompt["prompt_token_ids"], params.seed, number)
                is_last = number == params.max_tokens - 1
                part = SimpleNamespace(token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=-1.0)}])
                part.finish_reason = "length" if is_last else None
                if not spans or spans[-1].version != self.version:
                    spans.append(SimpleNamespace(version=self.version, start=number))
                spans[-1].end = number + 1
                part.weight_versions = spans if is_last else None
                yield SimpleNamespace(outputs=[part], prompt_token_ids=prompt["prompt_token_ids"])
        finally:
            self.num_running -= 1
        self.sampled.append(params.seed)


class SimulatedServer:
    """A server that may be killed and started again at its port."""

    def __init__(self, model: Any, dtype: str = "float32"):
        self._model, self._dtype = model, dtype
        self.port = free_port()
        self._server: uvicorn.Server | None = None
        self.start()

    def start(self) -> None:
        """Start it, with weights that were never pushed."""
        self.engine = Engine(self._model, self._dtype)
        posts = [Route(f"/v1/{name}", _ok, methods=["POST"]) for name in ("completions", "chat/completions")]
        app = Starlette(routes=[Route("/health", _ok), Route("/version", _version), *posts])
        app.add_middleware(Routes)  # type: ignore[arg-type]
        app.state.engine_client = self.engine
        app.middleware_stack = app.build_middleware_stack()  # now, with the key that is in the environment
        config = uvicorn.Config(app, port=self.port, log_config=None, lifespan="off", timeout_graceful_shutdown=0)
        self._server, self._loop = uvicorn.Server(config), None
        self._thread = threading.Thread(target=self._run, args=(self._server,), daemon=True)
        self._thread.start()
        until(lambda server=self._server: server.started)

    def _run(self, server: uvicorn.Server) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await server.serve()

        asyncio.run(serve())

    def kill(self) -> None:
        """End it at once: connections break off, as those of a killed process."""
        server, self._server = self._server, None
        if server is None:
            return

        def end() -> None:
            server.should_exit = server.force_exit = True
            for connection in list(server.server_state.connections):
                connection.transport.abort()  # type: ignore[union-attr]

        self.engine.worker.is_hung.clear()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(end)
        self._thread.join(10.0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> Address:
        return Address.of(self.url)

    def engine_of(self, **options: Any) -> VLLMServerPool:
        """An engine for this server alone."""
        return pool_of([self], **options)


def pool_of(servers: Sequence[SimulatedServer], **options: Any) -> VLLMServerPool:
    """An engine for these servers."""
    pool = VLLMServerPool([server.address for server in servers], **{"timeout_s": 5.0, **options})
    for member in pool.members:
        member.bucket_bytes = 20_000
    return pool


async def _ok(request: Request) -> JSONResponse:
    await request.body()
    return JSONResponse({})


async def _version(request: Request) -> JSONResponse:
    return JSONResponse({"version": "0.32.0"})


def pretend_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put classes in place of vLLM's, and the key into the environment of servers and trainers."""
    package, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.SamplingParams = _SamplingParams  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    params.StructuredOutputsParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    pretend_weight_transfer(monkeypatch)
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def pretend_weight_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the parts of vLLM that a push needs in place of its own."""
    base = ModuleType("vllm.distributed.weight_transfer.base")
    base.WeightTransferInitRequest = base.WeightTransferUpdateRequest = SimpleNamespace  # type: ignore[attr-defined]
    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload = lambda model: None  # type: ignore[attr-defined]
    reload.finalize_layerwise_reload = lambda model, config: None  # type: ignore[attr-defined]
    for module in (base, reload):
        monkeypatch.setitem(sys.modules, module.__name__, module)


class _SamplingParams(SimpleNamespace):
    def verify(self, *configs: Any) -> None:
        pass


def servers_of(model: Any, number: int) -> Iterator[list[SimulatedServer]]:
    """For a fixture: servers that are killed in the end."""
    servers = [SimulatedServer(model) for _ in range(number)]
    yield servers
    for server in servers:
        server.kill()
