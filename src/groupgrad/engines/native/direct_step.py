"""The direct form of common decoders: a decode step in fewer calls than the model's modules make.

On a CPU a small model's step spends a fifth of its time between the matrix products: in module calls, and in norms and
rotary embeddings of many small operations each. The direct form applies the same formulas to the same weights in fewer
calls, or in one compiled call where all modules are plain and there is a compiler (see `kernels`). Decoders with
recurrent layers have only the compiled form. A probe run of the model records which attention each layer computes. The
first step runs in both forms, whose logits are compared (`runner.EagerStep`); so does the first step after the model's
modules have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from groupgrad.engines.native.cpp_step import CompiledModel, compiled_model
from groupgrad.engines.native.decoder_layers import Decoder, LayerModules, read_decoder
from groupgrad.kernels import layers as kernel_layers
from groupgrad.kernels import library
from groupgrad.modeling.families import (
    CAUSAL_LMS,
    DECODERS,
    HYBRID_DECODERS,
    HYBRID_LMS,
    is_rms_norm,
    is_transformers_class,
)
from groupgrad.modeling.fused_modules import is_replaced, is_silu
from groupgrad.modeling.scoring.attention_plan import AttentionCall, AttentionPlan
from groupgrad.modeling.vlm import is_multimodal


class DirectModel:
    """Computes the logits of one token for each of n rows, in float32 on a CPU."""

    def __init__(self, decoder: Decoder):
        self._embed, self._rotary = decoder.embedding, decoder.rotary
        self._head, self._norm = _function(decoder.head), _function(decoder.norm)
        self._layers = [_as_functions(layer) for layer in decoder.layers]

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """(n, V) logits after `tokens` (n,) at `positions` (n,)."""
        hidden = self._embed(tokens)
        cos, sin = (table[0, :, None] for table in self._rotary(hidden[None], positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for layer in self._layers:
            modules, head_dim = layer.modules, layer.head_dim
            normed = modules["attention_norm"](hidden)
            query = modules["query"](normed).unflatten(-1, (-1, head_dim))
            key = modules["key"](normed).unflatten(-1, (-1, head_dim))
            if modules["query_norm"] is not None:
                query, key = modules["query_norm"](query), modules["key_norm"](key)
            num_heads = query.shape[1]
            both = torch.cat([query, key], dim=1)
            both = (both * cos + both.roll(half, -1) * sin).transpose(0, 1)
            value = modules["value"](normed).unflatten(-1, (-1, head_dim)).transpose(0, 1)
            assert layer.call is not None  # layers without attention have the compiled form alone
            attended = plan.attend(both[:num_heads], both[num_heads:], value, layer.call)
            hidden = hidden + modules["output"](attended.flatten(1))
            normed = modules["mlp_norm"](hidden)
            hidden = hidden + modules["down"](layer.activation(modules["gate"](normed), modules["up"](normed)))
        return self._head(self._norm(hidden))


def direct_model(model: nn.Module, calls: dict[int, AttentionCall]) -> CompiledModel | DirectModel | None:
    """The direct form of `model`, adapters included; None if it has none. `calls` are its attention calls by layer."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    parts = _known_parts(inner)
    if parts is None or torch.is_autocast_enabled("cpu"):
        return None
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for part in parts for p in part.parameters()):
        return None
    # Hooks and replaced forward methods work only if the module is called.
    if any(_must_be_called(module) for part in parts for module in part.modules()):
        return None
    decoder = read_decoder(parts[-2], parts[-1], calls)
    if decoder is None:
        return None
    compiled = compiled_model(decoder)
    has_recurrence = any(layer.call is None for layer in decoder.layers)
    return compiled if compiled is not None or has_recurrence else DirectModel(decoder)


def _known_parts(inner: Any) -> tuple[Any, ...] | None:
    """The modules that compute a known family's logits, of which the last two are the decoder and the head."""
    if not is_transformers_class(type(inner)):
        return None
    if type(inner).__name__ in CAUSAL_LMS | HYBRID_LMS:
        return inner, inner.model, inner.lm_head
    # Some text-only models put other layers around a decoder of the same name.
    decoder, head = (inner.get_decoder(), inner.get_output_embeddings()) if is_multimodal(inner) else (None, None)
    is_known = type(decoder).__name__ in DECODERS | HYBRID_DECODERS and is_transformers_class(type(decoder))
    return (decoder, head) if is_known and type(head) is nn.Linear else None


def _must_be_called(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or ("forward" in module.__dict__ and type(module) is not nn.Linear and not is_replaced(module))
    )


def _as_functions(layer: LayerModules) -> LayerModules:
    """The layer with functions in place of its modules; `activation` becomes activation(gate) * up."""
    functions = {name: module if module is None else _function(module) for name, module in layer.modules.items()}
    return replace(layer, activation=_gated(layer.activation), modules=functions)


def _function(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The formula of a plain module as a function; any other module, such as an adapter, itself."""
    if type(module) is nn.Linear:
        return module.forward
    if is_rms_norm(module):
        weight, epsilon, kernels = module.weight, module.variance_epsilon, library()
        if kernels is not None:
            return lambda hidden: kernel_layers.norm(kernels, hidden, weight, epsilon)
        return lambda hidden: F.rms_norm(hidden, weight.shape, weight, epsilon)
    return module


def _gated(activation: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """activation(gate) * up."""
    kernels = library() if is_silu(activation) else None
    if kernels is not None:
        return partial(kernel_layers.gated, kernels)
    return lambda gate, up: activation(gate).mul_(up)
