"""The modules of a decoder's layers by their names in the compiled decode step, and what is read from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from groupgrad.modeling.families import CENTRED_NORMS, GATED_NORMS, is_rms_norm
from groupgrad.modeling.scoring.attention_plan import AttentionCall

NORMS = {
    "attention_norm": "input_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}
"""Norms of a decoder layer, by their names in the kernel. A layer may lack those of queries and keys."""

LINEARS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Linear layers of a decoder layer. One of the gated delta rule has those of the MLP alone."""

RECURRENT_LINEARS = {
    "inputs": "in_proj_qkv",
    "gates": "in_proj_z",
    "strengths": "in_proj_b",
    "decays": "in_proj_a",
    "output": "out_proj",
}
"""Linear layers of a gated delta rule."""


@dataclass(slots=True, frozen=True)
class LayerModules:
    """Modules of one decoder layer, and the attention that it computes, unless it has the gated delta rule."""

    call: AttentionCall | None
    head_dim: int
    activation: Any
    modules: dict[str, Any]
    """Norms and linear layers under their names in `NORMS` and `LINEARS`; None for those that the layer lacks."""
    recurrent: Any = None
    """The module of a gated delta rule."""

    def all_modules(self) -> list[Any]:
        """The layer's norms, linear layers and convolutions."""
        modules = [module for module in self.modules.values() if module is not None]
        if self.recurrent is not None:
            modules += [getattr(self.recurrent, name) for name in (*RECURRENT_LINEARS.values(), "conv1d", "norm")]
        return modules


def layer_modules(layer: Any, calls: dict[int, AttentionCall]) -> LayerModules:
    """The modules of a layer of a known decoder (see `families`); `calls` are the attention calls by layer."""
    modules = {
        name: reduce(lambda owner, key: getattr(owner, key, None), path.split("."), layer)
        for name, path in (NORMS | LINEARS).items()
    }
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        return LayerModules(None, 0, layer.mlp.act_fn, modules, layer.linear_attn)
    return LayerModules(calls[attention.layer_idx], attention.head_dim, layer.mlp.act_fn, modules)


def recurrent_sizes(module: Any) -> dict[str, int]:
    """Sizes of a gated delta rule by their names in the kernel."""
    return {
        "value_heads": module.num_v_heads,
        "key_heads": module.num_k_heads,
        "key_width": module.head_k_dim,
        "value_width": module.head_v_dim,
        "taps": module.conv_kernel_size,
    }


def rotary_width(inner: Any) -> int:
    """Numbers of a head that the decoder's rotary embedding turns."""
    return 2 * inner.model.rotary_emb.inv_freq.numel()


def is_norm(module: Any) -> bool:
    """True for an RMS norm that the kernel computes."""
    return type(module).__name__ in CENTRED_NORMS | GATED_NORMS or is_rms_norm(module)


def norm_weight(norm: Any) -> torch.Tensor:
    """The factors, one for each number, by which a norm multiplies its vectors."""
    weight = norm.weight.detach()
    return 1.0 + weight if type(norm).__name__ in CENTRED_NORMS else weight


def norm_epsilon(norm: Any) -> float:
    """The number that a norm adds to the mean of squares."""
    return norm.eps if type(norm).__name__ in CENTRED_NORMS else norm.variance_epsilon
