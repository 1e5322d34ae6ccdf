"""Routes attention that a model file of transformers computes itself to an attention plan.

Some older families do not call transformers' attention interface: a method of their layer (GPT-Neo) or its whole
`forward` (BLOOM, MPT, Falcon) computes scores and weights. That method is wrapped once, on its class: the
wrapper calls its counterpart here where the layer is given a plan in place of its mask, and the original otherwise. The
layer's own modules still make queries, keys, values and the output. No model file is copied.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from groupgrad.modeling.families import is_transformers_class
from groupgrad.modeling.scoring.attention_plan import AttentionCall, AttentionPlan

_WIDTH_STEP = 8
"""Widths of heads with a bias are multiples of this, as vector instructions read them."""


class PlanMask:
    """An attention plan passed to the layers of a model in place of the mask.

    It has the few attributes that the model files read from a mask, and the positions of the flat tokens.
    """

    ndim = 0
    __iter__ = None  # with `__getitem__` alone, iterating would never end

    def __init__(self, plan: AttentionPlan, positions: torch.Tensor):
        self._plan = plan
        self.positions = positions
        """(T,) indices of the flat tokens in their rows, or (3, T) with several axes."""
        self._layer_of: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Identity of a key tensor -> the tensor, and the first layer that has passed it."""

    def to(self, *_: object, **__: object) -> PlanMask:
        """Returns itself. Model files call `to` to convert the dtype of a mask; a plan has none."""
        return self

    def __getitem__(self, _: object) -> PlanMask:
        """Returns itself. Gemma 4 slices masks to the queries that logits are wanted for, which are all here."""
        return self

    def source(self, key: torch.Tensor, layer: int) -> int | None:
        """The earlier layer that has passed this very tensor of keys, as layers that share them do, or None."""
        known, first = self._layer_of.get(id(key), (None, layer))
        if known is None or known() is not key:
            self._layer_of[id(key)], first = (weakref.ref(key), layer), layer
        return None if first == layer else first

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, E) outputs of the plan."""
        return self._plan.attend(query, key, value, call)

    def attend_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """(1, T, Hq, E) outputs from query (1, Hq, T, D), key and value (1, Hkv, T, ...), in the value's type."""
        dtype = value.dtype
        return self.attend(query[0].to(dtype), key[0].to(dtype), value[0], call)[None]

    def attend_with_slopes(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slopes: torch.Tensor,
        call: AttentionCall,
        *,
        is_scaled: bool = False,
    ) -> torch.Tensor:
        """`attend_heads` with ALiBi (arXiv:2108.12409): a key's score grows by its position times its head's slope.

        `slopes` (Hq,) have the dtype in which the model multiplies them with positions. The bias of a key is an extra
        channel of the key. The query holds 1 / scale there, or 1 if the model scales the bias too (`is_scaled`). Both
        channels are doubled: the query's pair is 1 / scale as rounded to half precision and what the rounding lost.
        """
        width, dtype = query.shape[-1], value.dtype
        more = -(width + 2) % _WIDTH_STEP + 2
        bias = (slopes[:, None] * self.positions).to(dtype)[None, :, :, None]
        unscaled = torch.zeros(more, dtype=torch.float64, device=query.device)
        factor = 1.0 if is_scaled else 1 / call.scale
        unscaled[0] = torch.tensor(factor, dtype=dtype)
        unscaled[1] = factor - unscaled[0]
        heads, tokens = query.shape[1:3]
        query = torch.cat([query.to(dtype), unscaled.to(dtype).expand(1, heads, tokens, more)], dim=-1)
        key, value = (x.expand(1, heads, tokens, width) for x in (key, value))
        key = torch.cat(
            [key.to(dtype), bias.expand(1, heads, tokens, 2), key.new_zeros(1, heads, tokens, more - 2)], -1
        )
        return self.attend_heads(query, key, F.pad(value, (0, more)), call)[..., :width]


def _gpt_neo(
    module: Any, plan: PlanMask, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> tuple[torch.Tensor, None]:
    call = AttentionCall(
        layer=_layer(module),
        scale=1.0,
        window=module.config.window_size if module.attention_type == "local" else None,
        dropout=_dropout(module, module.attn_dropout.p),
    )
    return plan.attend_heads(query, key, value, call).transpose(1, 2), None


def _bloom(
    module: Any, plan: PlanMask, hidden_states: torch.Tensor, residual: torch.Tensor, **_: object
) -> tuple[torch.Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    slopes = _slopes(sys.modules[type(module).__module__].build_alibi_tensor, module.num_heads, value.device)
    dropout = _dropout(module, module.attention_dropout.p)
    call = AttentionCall(_layer(module), module.inv_norm_factor, dropout=dropout)
    output = module.dense(plan.attend_with_slopes(query, key, value, slopes, call).flatten(2))
    return residual + F.dropout(output, module.hidden_dropout, module.training), None


def _mpt(module: Any, plan: PlanMask, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=-1))
    slopes = _slopes(sys.modules[type(module).__module__].build_mpt_alibi_tensor, module.n_heads, value.device)
    call = AttentionCall(_layer(module), module.softmax_scale, dropout=_dropout(module, module.attn_dropout_p))
    return module.out_proj(plan.attend_with_slopes(query, key, value, slopes, call).flatten(2)), None


def _falcon(
    module: Any,
    plan: PlanMask,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    query, key, value = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
    functions = sys.modules[type(module).__module__]
    if alibi is None:
        call = AttentionCall(_layer(module), module.inv_norm_factor)
        query, key = functions.apply_rotary_pos_emb(query, key, *(position_embeddings or ()))
        output = plan.attend_heads(query, key, value, call)
    else:
        dropout = _dropout(module, module.attention_dropout.p)
        call = AttentionCall(_layer(module), module.inv_norm_factor, dropout=dropout)
        # Falcon rounds slopes and biases to bfloat16, and scales them like the scores.
        slopes = _slopes(functions.build_alibi_tensor, module.num_heads, value.device).bfloat16()
        output = plan.attend_with_slopes(query, key, value, slopes, call, is_scaled=True)
    return module.dense(output.flatten(2)), None


_ROUTES: dict[str, tuple[str, Callable[..., tuple[torch.Tensor, None]]]] = {
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "BloomAttention": ("forward", _bloom),
    "MptAttention": ("forward", _mpt),
    "FalconAttention": ("forward", _falcon),
}
"""Class of attention layers in transformers' model files -> the method that gets the mask, and the function that
computes it under a plan."""

_classes: WeakKeyDictionary[nn.Module, list[type[nn.Module]]] = WeakKeyDictionary()

_wrappers: set[Callable[..., Any]] = set()


def unroutable_attention(model: nn.Module) -> str | None:
    """Why the routed layers of `model` cannot run a plan, or None."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "slow_but_exact", False) and getattr(config, "pretraining_tp", 1) > 1:
        return "its slow_but_exact splits the products of its layers"
    classes = {cls.__name__ for cls in routed_classes(model)}
    if "FalconAttention" in classes and config.alibi and config._attn_implementation != "sdpa":
        return "its eager attention adds the bias of alibi twice; attn_implementation='sdpa' adds it once"
    return None


def route_attention(model: nn.Module) -> None:
    """Wraps the attention layers of `model`, once for each class."""
    for cls in routed_classes(model):
        _wrap(cls, *_ROUTES[cls.__name__])


def routed_classes(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of attention layers in `model` that compute attention themselves and can be routed."""
    if model not in _classes:
        found = {type(module) for module in model.modules() if type(module).__name__ in _ROUTES}
        # A release in which a class has lost the method computes attention elsewhere.
        _classes[model] = [
            cls for cls in found if is_transformers_class(cls) and hasattr(cls, _ROUTES[cls.__name__][0])
        ]
    return _classes[model]


def _wrap(cls: type[nn.Module], method: str, counterpart: Callable[..., tuple[torch.Tensor, None]]) -> None:
    original = getattr(cls, method)
    if original in _wrappers:
        return

    @functools.wraps(original)
    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        plan = next((value for value in given if isinstance(value, PlanMask)), None)
        if plan is None:
            return original(module, *args, **kwargs)
        return counterpart(module, plan, *args, **kwargs)

    _wrappers.add(wrapper)
    setattr(cls, method, wrapper)


def _layer(module: Any) -> int:
    """Index of the layer in the model."""
    return int(module.layer_id if hasattr(module, "layer_id") else module.layer_idx)


def _dropout(module: nn.Module, share: float) -> float:
    return float(share) if module.training else 0.0


@cache
def _slopes(build: Callable[..., torch.Tensor], num_heads: int, device: torch.device) -> torch.Tensor:
    """(H,) float32 slopes of a model file's ALiBi: by how much its bias grows from one position to the next."""
    if build.__name__ == "build_mpt_alibi_tensor":
        bias = build(num_heads, 2)
    else:
        bias = build(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)
    return (bias[..., 1] - bias[..., 0]).flatten().to(device)
