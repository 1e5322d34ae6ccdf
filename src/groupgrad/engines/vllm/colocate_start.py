"""Starts vLLM in the training process and undoes its side effects on that process."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from groupgrad import dist
from groupgrad.engines.vllm.lora import lora_rank
from groupgrad.engines.vllm.tensor_parallel import launcher_environment
from groupgrad.engines.vllm.vllm_params import PROCESSED
from groupgrad.engines.vllm.worker import EXTENSION
from groupgrad.modeling.scoring.forward import unwrap


@dataclass(slots=True, frozen=True)
class ColocateOptions:
    """Options with which vLLM is started in the training process."""

    max_num_seqs: int
    """Rows sampled at the same time."""
    max_model_len: int | None = None
    """Limit on the tokens of prompt and completion together; None: the limit in the model's config."""
    memory_utilization: float = 0.3
    """Share of the device's memory for vLLM's weights and cache (of the machine's memory on a CPU)."""
    dtype: str = "bfloat16"
    """Type of vLLM's weights and of its computation."""
    model_impl: str = "vllm"
    """`vllm`, or `transformers` for transformers' code inside vLLM."""
    sleep_mode: bool = False
    """Let `sleep` free vLLM's memory while training runs; not on CPUs."""
    tensor_parallel_size: int = 1
    """Ranks that hold one model together; it must divide their number."""
    max_lora_rank: int = 0
    """Largest rank of an adapter that `push_adapter` may send; 0: adapters can only be merged."""
    regex: str | None = None
    """Expression that every completion must match."""
    logprobs_mode: str = PROCESSED
    """Distribution of the log-probs, see `vllm_params`."""
    trust_remote_code: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM` by their own names; they override the fields above."""


def save_config(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Save the files from which vLLM builds the model, without its weights."""
    inner: Any = unwrap(model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    base.config.save_pretrained(folder)
    # A config that was built in code has no architecture.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = config.get("architectures") or [type(base).__name__]
    path.write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)


def start(folder: str, options: ColocateOptions) -> Any:
    """vLLM's `LLM` of the model in `folder`, with random weights. Collective if several ranks train.

    A single process needs no rendezvous: vLLM picks a free port, and `MASTER_ADDR` and `MASTER_PORT` are not read.
    """
    # Keep vLLM from binding the training threads to cores of its choice.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with _process_state_restored(), _engine_in_this_process():
        from vllm.platforms import current_platform

        from vllm import LLM

        is_cpu = current_platform.is_cpu()
        if options.sleep_mode and is_cpu:
            raise ValueError("vllm_enable_sleep_mode=True, but vLLM cannot sleep on a CPU; set it to False")
        arguments = _llm_arguments(folder, options)
        if is_cpu:
            arguments["enable_chunked_prefill"] = False  # see `server_launch.whole_prompts`
        if not dist.is_active():
            return LLM(**{**arguments, **options.extra})
        arguments["distributed_executor_backend"] = "external_launcher"
        arguments["tensor_parallel_size"] = options.tensor_parallel_size
        # Each engine samples the rows of all ranks that share its model.
        arguments["max_num_seqs"] = options.max_num_seqs * options.tensor_parallel_size
        with launcher_environment():
            return LLM(**{**arguments, **options.extra})


def _llm_arguments(folder: str, options: ColocateOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": folder,
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.memory_utilization,
        "model_impl": options.model_impl,
        "enable_sleep_mode": options.sleep_mode,
        "trust_remote_code": options.trust_remote_code,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": options.logprobs_mode,
        "worker_extension_cls": EXTENSION,
    }
    if options.max_lora_rank:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(options.max_lora_rank)}
    return arguments


@contextmanager
def _engine_in_this_process() -> Iterator[None]:
    """Keep vLLM from starting a process for its engine; processes started later do not inherit the setting."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    previous = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


@contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restore the random streams, thread settings and default dtype after vLLM's start.

    vLLM seeds the global random streams; on a CPU it replaces `torch.set_num_threads` and changes the thread count.
    """
    python_stream, numpy_stream, torch_stream = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_streams = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        random.setstate(python_stream)
        np.random.set_state(numpy_stream)
        torch.set_rng_state(torch_stream)
        if cuda_streams:
            torch.cuda.set_rng_state_all(cuda_streams)
        torch.set_num_threads = set_num_threads
        with contextlib.suppress(RuntimeError):
            torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)


@contextmanager
def classes_restored(model: nn.Module) -> Iterator[None]:
    """Confine patches of the policy's classes, made inside, to vLLM's own modules.

    With `model_impl="transformers"` vLLM builds modules of the policy's classes, and patches these with a `__call__`
    for compilation that ignores hooks and fails on modules that vLLM has not built.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    originals = {cls: dict(cls.__dict__) for cls in classes - {nn.Module}}
    try:
        yield
    finally:
        for cls, original in originals.items():
            if cls.__dict__.get("__init__") is not original.get("__init__"):
                # vLLM's modules exist by now, so its `__init__` has done its work.
                if "__init__" in original:
                    cls.__init__ = original["__init__"]
                else:
                    del cls.__init__
            if cls.__dict__.get("__call__") is not original.get("__call__"):
                cls.__call__ = _dispatch_call(cls, cls.__dict__["__call__"], original.get("__call__"))


def _dispatch_call(cls: Any, patched: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    """A `__call__` that runs vLLM's patch on vLLM's modules, and the original on all others."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "vllm_config" in vars(self):
            return patched(self, *args, **kwargs)
        return super(cls, self).__call__(*args, **kwargs) if original is None else original(self, *args, **kwargs)

    return __call__
