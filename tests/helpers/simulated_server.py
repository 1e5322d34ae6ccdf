"""A vLLM server without vLLM: groupgrad's routes over HTTP, in front of a worker that holds a small model's weights.

Tokens are a function of the weights, the prompt and the row's seed, so servers with the same weights agree.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from groupgrad.engines.vllm.client import VLLMServerEngine
from groupgrad.engines.vllm.http import Address
from groupgrad.engines.vllm.server import Routes
from groupgrad.engines.vllm.wire import specs_from_json
from groupgrad.engines.vllm.worker import WeightReceiver, _Push

KEY = "the-key-of-these-tests"


class Worker(WeightReceiver):
    """A worker whose model is a dict of tensors, written in place as vLLM's are. While `is_hung` it answers nothing."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, model: Any):
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        self.is_hung = threading.Event()

    def groupgrad_begin(self, specs: list[list[Any]]) -> None:
        self._groupgrad_push = _Push(specs_from_json(specs), {})

    def groupgrad_tensors(self, tensors: list[tuple[str, Any]]) -> None:
        push = self._groupgrad_push
        assert push is not None and push.loaded is not None
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)
            push.loaded.add(name)
        push.num_tensors += len(tensors)

    def _groupgrad_model(self) -> Any:
        return SimpleNamespace(named_parameters=self.weights.items)

    def _groupgrad_finish(self) -> None:
        self._groupgrad_push = None

    @property
    def digest(self) -> int:
        """Of all weights."""
        value = 0
        for tensor in self.weights.values():
            value = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, value)
        return value


class Engine:
    """In place of vLLM's engine; a token takes `token_s` seconds."""

    errored = False
    input_processor = SimpleNamespace(
        model_config=None, speculative_config=None, structured_outputs_config=None, tokenizer=None
    )
    vllm_config = SimpleNamespace(lora_config=None)

    def __init__(self, model: Any, dtype: str):
        self.worker, self.token_s = Worker(model), 0.0
        config = SimpleNamespace(architectures=[type(model).__name__], get_text_config=model.config.get_text_config)
        vocab_size = model.config.vocab_size
        self.model_config = SimpleNamespace(
            model="simulated", hf_config=config, get_vocab_size=lambda: vocab_size, dtype=dtype, max_model_len=64
        )
        self.model_config.quantization, self.model_config.logprobs_mode = None, "processed_logprobs"
        self.sampled: list[int] = []
        """The seeds of the rows that ended here."""

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        while self.worker.is_hung.is_set():
            await asyncio.sleep(0.01)
        return [await asyncio.to_thread(getattr(self.worker, name), *args, **(kwargs or {}))]

    async def reset_prefix_cache(self) -> bool:
        return True

    async def reset_encoder_cache(self) -> None:
        pass

    async def update_weight_version(self, version: str) -> None:
        pass

    async def generate(self, prompt: Any, params: Any, name: str, *, lora_request: Any) -> AsyncIterator[Any]:
        stream = random.Random(f"{self.worker.digest} {prompt['prompt_token_ids']} {params.seed}")
        for number in range(params.max_tokens):
            await asyncio.sleep(self.token_s)
            while self.worker.is_hung.is_set():
                await asyncio.sleep(0.01)
            token, is_last = stream.randrange(4, 90), number == params.max_tokens - 1
            part = SimpleNamespace(token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=-1.0)}])
            part.finish_reason = "length" if is_last else None
            yield SimpleNamespace(outputs=[part], prompt_token_ids=prompt["prompt_token_ids"])
        self.sampled.append(params.seed)


class SimulatedServer:
    """A server that may be killed and started again at its port."""

    def __init__(self, model: Any, dtype: str = "float32"):
        self._model, self._dtype = model, dtype
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._server: uvicorn.Server | None = None
        self.start()

    def start(self) -> None:
        """Start it, with weights that were never pushed."""
        self.engine = Engine(self._model, self._dtype)
        app = Starlette(routes=[Route("/health", _ok), Route("/version", _version), Route("/v1/completions", _ok)])
        app.router.routes[-1].methods = {"POST"}  # type: ignore[attr-defined]
        app.add_middleware(Routes)  # type: ignore[arg-type]
        app.state.engine_client = self.engine
        app.middleware_stack = app.build_middleware_stack()  # now, with the key that is in the environment
        config = uvicorn.Config(app, port=self.port, log_config=None, lifespan="off", timeout_graceful_shutdown=0)
        self._server, self._loop = uvicorn.Server(config), None
        self._thread = threading.Thread(target=self._run, args=(self._server,), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10.0
        while not self._server.started:
            assert time.monotonic() < deadline, "the simulated server did not start"
            time.sleep(0.005)

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

    def client(self, **options: Any) -> VLLMServerEngine:
        """An engine for this server alone."""
        return VLLMServerEngine(Address.of(self.url), **{"timeout_s": 5.0, "bucket_bytes": 20_000, **options})


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
    monkeypatch.setenv("VLLM_API_KEY", KEY)


class _SamplingParams(SimpleNamespace):
    def verify(self, *configs: Any) -> None:
        pass


def servers_of(model: Any, number: int) -> Iterator[list[SimulatedServer]]:
    """For a fixture: servers that are killed in the end."""
    servers = [SimulatedServer(model) for _ in range(number)]
    yield servers
    for server in servers:
        server.kill()
