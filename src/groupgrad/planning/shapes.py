"""Numbers of a model that decide its memory, from its configuration alone."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from groupgrad.modeling.load import max_context
from groupgrad.modeling.model_names import missing_because
from groupgrad.modeling.scoring.forward import ForwardOptions
from groupgrad.modeling.systems.checkpointing import activation_bytes_per_token

_SMALL_HIDDEN, _SMALL_VOCAB = 1024, 512
"""Sizes of the copies on which activations are measured."""


@dataclass(slots=True, frozen=True)
class ModelShape:
    """Counts of parameters, and bytes per token."""

    name: str
    parameters: int
    layers: int
    layer_parameters: int
    """Parameters of one layer."""
    head_parameters: int
    """Parameters of the output head."""
    largest_parameter: int
    """Numbers of the largest weight."""
    linear_parameters: int
    """Parameters of linear layers within the layers; these can be quantized."""
    adapter_inputs: int
    """Inputs and outputs of all these linear layers together: parameters of an adapter of rank 1."""
    hidden: int
    kv_values: int
    """Numbers of one token's keys and values, in all layers."""
    context: int | None
    """Most positions of prompt and completion together; None without a limit."""
    layer_bytes: float
    """Bytes of activations that a layer saves per token."""
    other_bytes: float
    """Bytes of activations per token outside of the layers."""


def read_config(name: str) -> Any:
    """Loads a configuration from a folder, a config.json or the hub's cache. ValueError with what to give instead."""
    wanted = "give a folder with a config.json, or a config.json"
    if (why := missing_because(name)) is not None:
        raise ValueError(f"--model {name}: {why}; {wanted}")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {name}: {str(error).splitlines()[0].rstrip('.')}; {wanted}") from error


def model_shape(name: str, config: Any, *, half: bool) -> ModelShape:
    """Counts a model on the meta device, and measures the activations of small copies of it.

    With `half` the activations are those of autocast in bfloat16. ValueError for an architecture without the usual
    sizes, such as one with recurrent layers.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    layers = next((m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 0), None)
    heads = getattr(text, "num_attention_heads", None)
    if layers is None or heads is None or len(layers) != text.num_hidden_layers:
        raise ValueError(f"{name}: {type(model).__name__} has layers of a kind that is not predicted yet")
    linear = [part for part in layers.modules() if isinstance(part, torch.nn.Linear)]
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    factor = _factor(text, heads, kv_heads)
    one, two = (_activations(text, count, factor, half=half) for count in (1, 2))
    return ModelShape(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=len(layers),
        layer_parameters=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        head_parameters=head.weight.numel() if (head := model.get_output_embeddings()) is not None else 0,
        largest_parameter=max(p.numel() for p in model.parameters()),
        linear_parameters=sum(part.weight.numel() for part in linear),
        adapter_inputs=sum(part.in_features + part.out_features for part in linear),
        hidden=text.hidden_size,
        kv_values=2 * kv_heads * head_dim * len(layers),
        context=max_context(model),
        layer_bytes=(two - one) * factor,
        other_bytes=max(0.0, 2 * one - two) * factor,
    )


def _factor(text: Any, heads: int, kv_heads: int) -> int:
    """The factor by which sizes are divided in the copies: a power of 2 that divides all of them."""
    factor, sizes = 1, (text.hidden_size, text.intermediate_size, heads, kv_heads)
    while text.hidden_size // factor > _SMALL_HIDDEN and all(size % (2 * factor) == 0 for size in sizes):
        factor *= 2
    return factor


def _activations(text: Any, layers: int, factor: int, *, half: bool) -> float:
    small = copy.deepcopy(text)
    if not getattr(small, "head_dim", None):
        small.head_dim = text.hidden_size // text.num_attention_heads
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if getattr(text, field, None):
            setattr(small, field, getattr(text, field) // factor)
    small.num_hidden_layers, small.vocab_size = layers, _SMALL_VOCAB
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:layers]
    for field in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(small, field, None)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).train()
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            return activation_bytes_per_token(model, ForwardOptions())
