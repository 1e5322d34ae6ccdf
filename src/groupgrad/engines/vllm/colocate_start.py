"""Starting vLLM in the process that trains, without changing that process."""

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
from groupgrad.engines.vllm.ranks import launcher_environment
from groupgrad.engines.vllm.vllm_params import PROCESSED
from groupgrad.engines.vllm.worker import EXTENSION
from groupgrad.modeling.scoring.forward import unwrap


@dataclass(slots=True, frozen=True)
class ColocateOptions:
    """How vLLM is started in the training process."""

    max_num_seqs: int
    """Rows sampled at the same time."""
    max_model_len: int | None = None
    """Tokens of prompt and completion together; None: what the model's config says."""
    memory_utilization: float = 0.3
    """Share of the device's memory that vLLM takes for its weights and cache (of the machine's memory on a CPU)."""
    dtype: str = "bfloat16"
    """In which vLLM holds the weights and computes."""
    model_impl: str = "vllm"
    """`vllm`, or `transformers` for transformers' code inside vLLM."""
    sleep_mode: bool = False
    """Let `sleep` give the memory back while training runs; not on CPUs."""
    tensor_parallel_size: int = 1
    """Ranks that hold one model together; it must divide their number."""
    max_lora_rank: int = 0
    """Largest rank of an adapter that `push_adapter` may send; 0: adapters can only be merged."""
    regex: str | None = None
    """What every completion must match."""
    logprobs_mode: str = PROCESSED
    """What log-probs are told, see `sampling.py`."""
    trust_remote_code: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM` by their own names; they win over the fields above."""


def save_config(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """What vLLM needs to build the model without its weights."""
    inner: Any = unwrap(model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    base.config.save_pretrained(folder)
    # A config that was made in code names no architecture.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = config.get("architectures") or [type(base).__name__]
    path.write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)


def start(folder: str, options: ColocateOptions) -> Any:
    """vLLM's `LLM` of the model in `folder`, with random weights; collective if several ranks train.

    A single process meets with nobody: vLLM takes a free port, and `MASTER_ADDR` and `MASTER_PORT` are not read.
    """
    # Threads that train are not to be moved to cores of vLLM's choice.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with _undisturbed(), _in_this_process():
        from vllm.platforms import current_platform

        from vllm import LLM

        if options.sleep_mode and current_platform.is_cpu():
            raise ValueError("vllm_enable_sleep_mode=True, but vLLM cannot sleep on a CPU; set it to False")
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
        if current_platform.is_cpu():
            arguments["enable_chunked_prefill"] = False  # see `launch.whole_prompts`
        if options.max_lora_rank:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(options.max_lora_rank)}
        if not dist.is_active():
            return LLM(**{**arguments, **options.extra})
        arguments["distributed_executor_backend"] = "external_launcher"
        arguments["tensor_parallel_size"] = options.tensor_parallel_size
        # The rows of all ranks that share a model are in each of their engines.
        arguments["max_num_seqs"] = options.max_num_seqs * options.tensor_parallel_size
        with launcher_environment():
            return LLM(**{**arguments, **options.extra})


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Keep vLLM from starting a process of its own for its engine; those started later are not to inherit that."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Undo what starting vLLM does to the process: it seeds the global random streams, and on a CPU takes
    `torch.set_num_threads` away and loses the number of threads."""
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        random.setstate(streams[0])
        np.random.set_state(streams[1])
        torch.set_rng_state(streams[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)
        torch.set_num_threads = set_num_threads
        with contextlib.suppress(RuntimeError):
            torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)


@contextmanager
def classes_kept(model: nn.Module) -> Iterator[None]:
    """What is done to the policy's classes inside holds for vLLM's modules alone afterwards.

    With `model_impl="transformers"` vLLM builds the policy's own classes, and gives them a `__call__` for compilation
    that knows no hooks and fails on any module that vLLM has not made.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    before = {cls: dict(cls.__dict__) for cls in classes - {nn.Module}}
    try:
        yield
    finally:
        for cls, own in before.items():
            if cls.__dict__.get("__init__") is not own.get("__init__"):
                # vLLM's modules have been made.
                _set_back(cls, "__init__", own)
            if cls.__dict__.get("__call__") is not own.get("__call__"):
                cls.__call__ = _told_apart(cls, cls.__dict__["__call__"], own.get("__call__"))


def _set_back(cls: type, name: str, own: dict[str, Any]) -> None:
    if name in own:
        setattr(cls, name, own[name])
    else:
        delattr(cls, name)


def _told_apart(cls: Any, theirs: Callable[..., Any], ours: Callable[..., Any] | None) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "vllm_config" in vars(self):
            return theirs(self, *args, **kwargs)
        return super(cls, self).__call__(*args, **kwargs) if ours is None else ours(self, *args, **kwargs)

    return __call__
