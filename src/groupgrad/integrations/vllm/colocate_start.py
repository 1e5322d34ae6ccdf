"""Starts vLLM in the training process and undoes its side effects on that process."""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import patch_environment
from torch import nn

from groupgrad import dist
from groupgrad.integrations.vllm.transfer_plugin import register
from groupgrad.integrations.vllm.vllm_params import PROCESSED, lora_rank
from groupgrad.integrations.vllm.wire import BACKEND
from groupgrad.models.families import layer_configs
from groupgrad.models.unwrapping import base_model, unwrap

MAX_NUM_SEQS = 256
"""Most rows that colocated vLLM samples at the same time; further ones wait."""


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
    sleep_level: int = 2
    """vLLM's level of sleep: 1 moves its weights to host memory, 2 drops them."""
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
    """Saves the files from which vLLM builds the model, without its weights."""
    base = base_model(unwrap(model))
    config = copy.deepcopy(base.config)
    config.architectures = config.architectures or [type(base).__name__]  # a config that was built in code has none
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def start(folder: str, options: ColocateOptions, *, is_recurrent: bool) -> Any:
    """vLLM's `LLM` of the model in `folder`, with random weights. Collective if several ranks train.

    `is_recurrent` says that the model has recurrent layers. Ranks meet where their launcher says (`MASTER_ADDR`,
    `MASTER_PORT`, `RANK`, ...). A single process needs no rendezvous: vLLM picks a free port.
    """
    # Keep vLLM from binding the training threads to cores of its choice.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM's engine runs in this process; processes that are started later do not inherit the setting.
    with _process_state_restored(), patch_environment(VLLM_ENABLE_V1_MULTIPROCESSING=0):
        from vllm.platforms import current_platform

        from vllm import LLM

        register()  # workers are in this process
        is_cpu = current_platform.is_cpu()
        if options.sleep_mode and is_cpu:
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
            "weight_transfer_config": {"backend": BACKEND},
        }
        if options.max_lora_rank:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(options.max_lora_rank)}
        if is_cpu:
            arguments["enable_chunked_prefill"] = False  # see `serve_command.whole_prompts`
            arguments["enable_prefix_caching"] = not is_recurrent  # vLLM caches states with chunked prefill only
        if dist.is_active():
            arguments |= {
                "distributed_executor_backend": "external_launcher",
                "tensor_parallel_size": options.tensor_parallel_size,
                # Each engine samples the rows of all ranks that share its model.
                "max_num_seqs": options.max_num_seqs * options.tensor_parallel_size,
            }
        return LLM(**{**arguments, **options.extra})


@contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restores the random streams, thread settings and default dtype after vLLM's start.

    vLLM seeds the global random streams; on a CPU it replaces `torch.set_num_threads` and changes the thread count.
    """
    python_stream, numpy_stream = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    dtype = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python_stream)
        np.random.set_state(numpy_stream)
        torch.set_num_threads = set_num_threads
        with contextlib.suppress(RuntimeError):
            torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)


@contextmanager
def classes_restored(model: nn.Module) -> Iterator[None]:
    """Confines patches of the policy's classes, made inside, to vLLM's own modules.

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


def check_tensor_parallel(config: Any, size: int, *, ranks: int) -> None:
    """ValueError if groups of `size` of the `ranks` cannot share a text model with this transformers config."""
    if size == 1:
        return
    if size > ranks or ranks % size:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size}, but {ranks} training {'rank' if ranks == 1 else 'ranks'} cannot be "
            f"shared out in groups of {size}: set it to a number that divides {ranks}, start more ranks, or use "
            'vllm_mode="server" and give it to `groupgrad vllm-serve`'
        )
    for layer in layer_configs(config) or [config]:
        _check_heads(layer, size)


def _check_heads(config: Any, size: int) -> None:
    """ValueError if the heads of a layer cannot be divided over `size` ranks."""
    heads = int(getattr(config, "num_attention_heads", None) or size)
    if heads % size:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size}, but the model's {heads} attention heads cannot be shared out in "
            f"{size} equal parts: set it to a number that divides {heads}"
        )
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size}, which neither divides the model's {kv_heads} key-value heads nor is "
            f"a multiple of them: set it to one that does"
        )
