"""The decode step of the most common decoders without the detours of a general model's code.

On a CPU a step of a small model spends a fifth of its time in between the matrix products: in module calls, in norms
and rotary embeddings of many small operations each. Here the same modules' weights go through the same formulas in
fewer calls: in one, where all modules are plain and there is a compiler (see `kernels`). Which attention each layer
asks for is noted from the model itself, and the first step is computed both ways and compared (see `graphs.EagerStep`);
so it is again when the model's parts are others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from groupgrad.engines.native.cpp_step import CompiledModel, compiled_model
from groupgrad.kernels import layers as parts
from groupgrad.kernels import library
from groupgrad.modeling.families import CAUSAL_LMS, DECODERS, is_rms_norm, is_transformers_class
from groupgrad.modeling.fused_modules import is_replaced, is_silu
from groupgrad.modeling.scoring.attention import AttentionCall, AttentionPlan
from groupgrad.modeling.vlm import is_multimodal

_Map = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True, frozen=True)
class _Layer:
    call: AttentionCall
    attention_norm: _Map
    query: _Map
    key: _Map
    value: _Map
    head_width: int
    query_norm: _Map | None
    key_norm: _Map | None
    output: _Map
    gated_norm: _Map
    gate: _Map
    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Of what `gate` and `up` give."""
    up: _Map
    down: _Map


class DirectModel:
    """Logits of one token each of n rows, float32, on one CPU."""

    def __init__(self, inner: Any, calls: dict[int, AttentionCall]):
        backbone = inner.model
        self._embed, self._rotary, self._head = backbone.embed_tokens, backbone.rotary_emb, _map(inner.lm_head)
        self._norm = _map(backbone.norm)
        self._layers = [_read_layer(layer, calls) for layer in backbone.layers]

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """(n, V) logits that follow `tokens` (n,) at `positions` (n,)."""
        hidden = self._embed(tokens)
        cos, sin = (table[0, :, None] for table in self._rotary(hidden[None], positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for layer in self._layers:
            normed = layer.attention_norm(hidden)
            query = layer.query(normed).unflatten(-1, (-1, layer.head_width))
            key = layer.key(normed).unflatten(-1, (-1, layer.head_width))
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = layer.query_norm(query), layer.key_norm(key)
            num_heads = query.shape[1]
            both = torch.cat([query, key], dim=1)
            both = (both * cos + both.roll(half, -1) * sin).transpose(0, 1)
            value = layer.value(normed).unflatten(-1, (-1, layer.head_width)).transpose(0, 1)
            mixed = plan.attend(both[:num_heads], both[num_heads:], value, layer.call)
            hidden = hidden + layer.output(mixed.flatten(1))
            normed = layer.gated_norm(hidden)
            hidden = hidden + layer.down(layer.gated(layer.gate(normed), layer.up(normed)))
        return self._head(self._norm(hidden))


def direct_model(model: nn.Module, calls: dict[int, AttentionCall]) -> CompiledModel | DirectModel | None:
    """The direct form of `model`, adapters included, or None if it has none; `calls` is what its layers ask for."""
    inner = _speaker(model.get_base_model() if hasattr(model, "get_base_model") else model)  # pyright: ignore
    if inner is None:
        return None
    if torch.is_autocast_enabled("cpu") or any(_is_other(p) for p in inner.parameters()):
        return None
    # Whoever hooks into a module, or replaces its forward method, wants to see it called.
    if any(_is_watched(module) for module in inner.modules()):
        return None
    layers = list(inner.model.layers)
    numbers = [getattr(layer.self_attn, "layer_idx", None) for layer in layers]
    if set(numbers) != set(calls) or len(numbers) != len(calls):
        return None
    return compiled_model(inner, calls) or DirectModel(inner, calls)


class _Speaker(nn.Module):
    """The language model of a model that sees, by the names of one that does not."""

    def __init__(self, decoder: Any, head: Any):
        super().__init__()
        self.model, self.lm_head = decoder, head


def _speaker(inner: Any) -> Any:
    """What decodes text in a model, if it is of a known kind: the model itself, or a part of one that sees."""
    if not is_transformers_class(type(inner)):
        return None
    if type(inner).__name__ in CAUSAL_LMS:
        return inner
    # Some models that do not see put other layers around a decoder of the same name.
    decoder, head = (inner.get_decoder(), inner.get_output_embeddings()) if is_multimodal(inner) else (None, None)
    is_known = type(decoder).__name__ in DECODERS and is_transformers_class(type(decoder))
    return _Speaker(decoder, head) if is_known and type(head) is nn.Linear else None


def _is_other(parameter: torch.Tensor) -> bool:
    return parameter.dtype != torch.float32 or parameter.device.type != "cpu"


def _is_watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or ("forward" in module.__dict__ and type(module) is not nn.Linear and not is_replaced(module))
    )


def _read_layer(layer: Any, calls: dict[int, AttentionCall]) -> _Layer:
    attention, gated = layer.self_attn, layer.mlp
    return _Layer(
        call=calls[attention.layer_idx],
        attention_norm=_map(layer.input_layernorm),
        query=_map(attention.q_proj),
        key=_map(attention.k_proj),
        value=_map(attention.v_proj),
        head_width=attention.head_dim,
        query_norm=_map(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_map(attention.k_norm) if hasattr(attention, "k_norm") else None,
        output=_map(attention.o_proj),
        gated_norm=_map(layer.post_attention_layernorm),
        gate=_map(gated.gate_proj),
        gated=_gated(gated.act_fn),
        up=_map(gated.up_proj),
        down=_map(gated.down_proj),
    )


def _map(module: Any) -> _Map:
    """What the module computes: of plain ones the bare formula, others (adapters) are called."""
    if type(module) is nn.Linear:
        return module.forward
    if is_rms_norm(module):
        weight, epsilon, kernels = module.weight, module.variance_epsilon, library()
        if kernels is not None:
            return lambda hidden: parts.norm(kernels, hidden, weight, epsilon)
        return lambda hidden: F.rms_norm(hidden, weight.shape, weight, epsilon)
    return module


def _gated(activation: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """activation(gate) * up."""
    kernels = library() if is_silu(activation) else None
    if kernels is not None:
        return partial(parts.gated, kernels)
    return lambda gate, up: activation(gate).mul_(up)
