"""Memory that vLLM and training need on one GPU, and the share of it that vLLM may be given.

vLLM takes its configured share of the device whatever it needs: its weights, a workspace, and the rest for keys and
values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from groupgrad.integrations.vllm.colocate_start import ColocateOptions
from groupgrad.integrations.vllm.wire import torch_dtype
from groupgrad.models.families import layer_configs

GIB = 2**30
WORKSPACE = 0.1
"""vLLM's workspace, as a share of its weights."""


@dataclass(slots=True, frozen=True)
class TrainingBytes:
    """Memory that training takes on this device."""

    weights: int
    """The policy, a reference model and other memory that stays."""
    gradients: int
    optimizer: int
    activations: int
    """Activations of the largest micro-batch, scratch memory included."""

    @property
    def while_sampling(self) -> int:
        """Memory that stays allocated during sampling."""
        return self.weights + self.optimizer

    @property
    def total(self) -> int:
        """Peak memory."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(slots=True, frozen=True)
class ServedBytes:
    """Memory that vLLM needs at least, on each device."""

    weights: int
    one_row: int
    """Keys and values of a row that fills the context."""
    context: int
    """Tokens of that row."""

    @classmethod
    def of_config(cls, weights: int, text: Any, options: ColocateOptions) -> ServedBytes:
        """From the bytes of all weights, in vLLM's type, and the configuration of the text decoder."""
        context = options.max_model_len or int(getattr(text, "max_position_embeddings", 0) or 0)
        itemsize = torch_dtype(options.dtype).itemsize
        one_row = cache_bytes(text, context, itemsize, options.tensor_parallel_size)
        return cls(weights // options.tensor_parallel_size, one_row, context)

    @property
    def total(self) -> int:
        """Weights, workspace and one row."""
        return self.weights + math.ceil(WORKSPACE * self.weights) + self.one_row


def cache_bytes(config: Any, num_tokens: int, itemsize: int, tensor_parallel_size: int = 1) -> int:
    """Bytes of the keys and values of so many tokens; `layer_types` has layers with a window, or without a cache.

    The last `num_kv_shared_layers` read those of earlier layers.
    """
    layers = layer_configs(config)
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    num_stored, num_values = len(layers) - (getattr(config, "num_kv_shared_layers", 0) or 0), 0
    for layer, layer_type in list(zip(layers, layer_types))[:num_stored]:
        window = int(getattr(layer, "sliding_window", None) or num_tokens)
        lengths = {"full_attention": num_tokens, "sliding_attention": min(window, num_tokens)}
        num_values += lengths.get(layer_type, 0) * _values_per_token(layer, tensor_parallel_size)
    return num_values * itemsize


def _values_per_token(config: Any, tensor_parallel_size: int) -> int:
    """Numbers of a token's keys and values in a layer with this configuration, on one rank."""
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if not heads:
        return 0
    if getattr(config, "kv_lora_rank", None):
        # Multi-head latent attention: one vector for all heads, replicated on every rank.
        return int(config.kv_lora_rank) + int(getattr(config, "qk_rope_head_dim", 0))
    kv_heads = max(1, int(getattr(config, "num_key_value_heads", None) or heads) // tensor_parallel_size)
    return 2 * kv_heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def memory_problem(
    served: ServedBytes, training: TrainingBytes, options: ColocateOptions, *, total: int, available: int
) -> str | None:
    """Error message if vLLM and training do not both fit on a device of `total` bytes; None if they do.

    `available` bytes are free, or held by this process.
    """
    taken = int(options.memory_utilization * total)
    beside = training.while_sampling if options.sleep_mode else training.total
    room = available - beside
    story = (
        f"vLLM needs at least {_gib(served.total)} (weights {_gib(served.weights)}, one row of {served.context} tokens "
        f"{_gib(served.one_row)}), takes {_gib(taken)}, and training takes {_gib(beside)} beside it, of "
        f"{_gib(available)} that this process may have"
    )
    if training.total > available:
        return (
            f"{story}; training alone needs {_gib(training.total)}: set gradient_checkpointing=True, lower "
            "per_device_train_batch_size or max_completion_length, or train an adapter (peft_config)"
        )
    if served.total > room:
        sleep = "" if options.sleep_mode else "set vllm_enable_sleep_mode=True, "
        return (
            f"{story}: both do not fit, whatever share vLLM is given; {sleep}lower vllm_max_model_length, train an "
            'adapter (peft_config), raise vllm_tensor_parallel_size, or use vllm_mode="server" on another device'
        )
    low, high = math.ceil(1000 * served.total / total) / 1000, math.floor(1000 * room / total) / 1000
    shares = f"set vllm_gpu_memory_utilization between {low:g} and {max(low, high):g}"
    if taken < served.total:
        return f"{story}: too little for vLLM; {shares} or lower vllm_max_model_length"
    if taken > room:
        return f"{story}: too much for both; {shares}"
    return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
