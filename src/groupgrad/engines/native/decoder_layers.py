"""Maps the names that the compiled decode step uses to a decoder's modules, and reads their settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal

import torch
from torch import nn

from groupgrad.models.families import CENTRED_NORMS, GATED_NORMS, GROUPED_NORMS, is_rms_norm
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.fused_modules import activation_of

NORMS = {
    "attention_norm": ("input_layernorm", "operator_norm", "norm"),
    "query_norm": ("self_attn.q_norm", "self_attn.q_layernorm"),
    "key_norm": ("self_attn.k_norm", "self_attn.k_layernorm"),
    "mlp_norm": ("post_attention_layernorm", "pre_ff_layernorm", "ffn_norm"),
}
"""Norms of a decoder layer: names in the kernel -> where families have them. A layer may lack any."""

LINEARS = {
    "query": ("self_attn.q_proj", "mixer.q_proj"),
    "key": ("self_attn.k_proj", "mixer.k_proj"),
    "value": ("self_attn.v_proj", "mixer.v_proj"),
    "output": ("self_attn.o_proj", "self_attn.out_proj", "mixer.o_proj"),
    "gate": ("mlp.gate_proj", "feed_forward.gate_proj", "feed_forward.w1"),
    "up": ("mlp.up_proj", "feed_forward.up_proj", "feed_forward.w3", "mixer.up_proj"),
    "down": ("mlp.down_proj", "feed_forward.down_proj", "feed_forward.w2", "mixer.down_proj"),
}
"""Linear layers of a decoder layer, likewise. The first four are attention's, the others the MLP's."""

DELTA_LINEARS = {
    "inputs": "in_proj_qkv",
    "gates": "in_proj_z",
    "strengths": "in_proj_b",
    "decays": "in_proj_a",
    "output": "out_proj",
}
"""Linear layers of a gated delta rule."""

RecurrentKind = Literal["delta", "mamba", "convolution"]
"""The gated delta rule, Mamba-2, or a short convolution between two gates (LFM2)."""

_RECURRENT_MODULES: dict[RecurrentKind, tuple[str, ...]] = {
    "delta": (*DELTA_LINEARS.values(), "conv1d", "norm"),
    "mamba": ("in_proj", "out_proj", "conv1d", "norm"),
    "convolution": ("in_proj", "out_proj", "conv"),
}


@dataclass(slots=True, frozen=True)
class LayerModules:
    """Modules of one decoder layer, which has a mixer (attention or a recurrence), an MLP, or both."""

    modules: dict[str, Any]
    """Norms and linear layers under their names in `NORMS` and `LINEARS`; None for those that the layer lacks."""
    activation: Any
    """The activation of the MLP; None in a layer without an MLP."""
    call: AttentionCall | None = None
    """The attention that the layer computes, if any."""
    head_dim: int = 0
    recurrent: Any = None
    """The module of the recurrence that the layer computes, if any."""

    @property
    def is_gated(self) -> bool:
        """True if the MLP multiplies its inner values with gates."""
        return self.modules["gate"] is not None

    def all_modules(self) -> list[Any]:
        """The layer's norms, linear layers and convolutions."""
        modules = [module for module in self.modules.values() if module is not None]
        kind = None if self.recurrent is None else recurrent_kind(self.recurrent)
        return modules + [getattr(self.recurrent, name) for name in (_RECURRENT_MODULES[kind] if kind else ())]


@dataclass(frozen=True)
class Decoder:
    """The parts of a known decoder (see `families`)."""

    embedding: Any
    rotary: Any
    """The module of the rotary embeddings; None if attention knows no positions."""
    layers: list[LayerModules]
    norm: Any
    head: Any

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters."""
        modules = [self.embedding, self.norm, self.head, *(m for layer in self.layers for m in layer.all_modules())]
        recurrent = [layer.recurrent for layer in self.layers if layer.recurrent is not None]
        weights = [parameter for module in recurrent for parameter in module.parameters(recurse=False)]
        return [*(parameter for module in modules for parameter in module.parameters()), *weights]


def read_decoder(backbone: Any, head: Any, calls: dict[int, AttentionCall]) -> Decoder | None:
    """The parts of a known decoder; `calls` are its attention calls by layer. None if a layer is of another kind."""
    layers = [_read_layer(layer, calls) for layer in backbone.layers]
    found = [layer for layer in layers if layer is not None]
    num_attention = sum(layer.call is not None for layer in found)
    if len(found) < len(layers) or num_attention != len(calls):
        return None
    norm = _first(backbone, ("norm", "norm_f", "final_layernorm", "embedding_norm"))
    embedding = _first(backbone, ("embed_tokens", "embeddings"))
    return Decoder(embedding, getattr(backbone, "rotary_emb", None), found, norm, head)


def _read_layer(layer: Any, calls: dict[int, AttentionCall]) -> LayerModules | None:
    """The modules of a layer; None if it is of another kind than those that the kernel computes."""
    modules = {name: _first(layer, paths) for name, paths in (NORMS | LINEARS).items()}
    mlp = _first(layer, ("mlp", "feed_forward", "mixer"))
    activation = activation_of(mlp) if modules["down"] is not None else None
    if modules["query"] is not None:
        attention = _first(layer, ("self_attn", "mixer"))
        call = calls.get(attention.layer_idx)
        return None if call is None else LayerModules(modules, activation, call, attention.head_dim)
    recurrent = _first(layer, ("linear_attn", "mamba", "conv", "mixer"))
    if recurrent_kind(recurrent) is not None:
        return LayerModules(modules, activation, recurrent=recurrent)
    if modules["down"] is None:  # such as experts
        return None
    modules["attention_norm"], modules["mlp_norm"] = None, modules["attention_norm"]
    return LayerModules(modules, activation)


def _first(owner: Any, paths: tuple[str, ...]) -> Any:
    """The first of the modules at these paths; None if there is none."""
    found = (reduce(lambda module, key: getattr(module, key, None), path.split("."), owner) for path in paths)
    return next((module for module in found if module is not None), None)


def recurrent_kind(module: Any) -> RecurrentKind | None:
    """The kind of recurrence that a module of a known decoder computes; None if it is of another kind."""
    names = {name for name, _ in module.named_children()}
    return next((kind for kind, needed in _RECURRENT_MODULES.items() if names.issuperset(needed)), None)


def recurrent_sizes(module: Any) -> dict[str, int]:
    """Sizes of a recurrent module by their names in the kernel."""
    match recurrent_kind(module):
        case "delta":
            sizes = module.num_v_heads, module.num_k_heads, module.head_k_dim, module.head_v_dim
        case "mamba":
            sizes = module.num_heads, module.n_groups, module.ssm_state_size, module.head_dim
        case _:
            return {"taps": module.conv_kernel_size, "convolved": module.conv.in_channels}
    names = "value_heads", "key_heads", "key_width", "value_width"
    return {"taps": module.conv_kernel_size, **dict(zip(names, sizes))}


def rotary_width(rotary: Any) -> int:
    """Numbers of a head that rotary embeddings turn."""
    return 0 if rotary is None else 2 * rotary.inv_freq.numel()


def is_norm(module: Any) -> bool:
    """True for an RMS norm that the kernel computes."""
    return type(module).__name__ in CENTRED_NORMS | GATED_NORMS | GROUPED_NORMS or is_rms_norm(module)


def norm_weight(norm: Any) -> torch.Tensor:
    """The factors, one for each number, by which a norm multiplies its vectors."""
    weight = norm.weight.detach()
    return 1.0 + weight if type(norm).__name__ in CENTRED_NORMS else weight


def norm_epsilon(norm: Any) -> float:
    """The number that a norm adds to the mean of squares."""
    return norm.eps if type(norm).__name__ in CENTRED_NORMS else norm.variance_epsilon
