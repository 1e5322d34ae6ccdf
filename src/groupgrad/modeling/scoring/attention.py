"""How groupgrad drives a model's attention: an attention plan goes where transformers puts the mask.

A model runs on flat, unpadded tokens, (1, T), and each of its layers hands its queries, keys and values to the plan in
force, which knows what attends to what. transformers' attention interface does the plugging: the attention
implementation of a model's configuration is wrapped in one that recognises plans and leaves every other call to the
implementation that was there before. No model file is patched, and a model that is used without a plan (its own
`generate`, a dense forward) runs as ever.

The plan itself is passed as the mask, not looked up when a layer runs, so that a layer that gradient checkpointing
computes again during the backward pass sees the plan of its own forward pass.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PREFIX = "groupgrad_"

_PLANNABLE_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
"""Entries of a configuration's `layer_types` whose only way to look at other tokens is attention over all of them."""


_WHOLE_CALL_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary positions whose frequencies follow from the largest position of a call, and hold for all of its rows."""


@dataclass(slots=True, frozen=True)
class AttentionCall:
    """What a layer asks of its attention."""

    layer: int
    """Number of the layer in the model."""
    scale: float
    """Multiplies the products of queries and keys."""
    softcap: float | None = None
    """Scores become cap * tanh(score / cap) if set."""
    window: int | None = None
    """A query sees the keys less than this many positions before it; None: all of them."""
    sinks: torch.Tensor | None = None
    """(Hq,) one more logit a head in the softmax's denominator."""
    dropout: float = 0.0
    """Share of attention weights dropped; 0 in evaluation mode."""


@runtime_checkable
class AttentionPlan(Protocol):
    """Knows which tokens of a flat (1, T) input attend to which keys."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D), where Hkv divides Hq."""
        ...


_configs: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""The configurations inside a model that name an attention implementation; found once, since sampling asks often."""

_in_use: list[AttentionPlan] = []
"""The plans of the model calls under way, innermost last."""


def run_planned(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, **extra: Any) -> Any:
    """The model's output for the flat tokens `ids` (T,) at `positions` (T,) under `plan`; keeps no keys of its own.

    Positions of several axes are (3, T). Of a model that sees only the language model's attention is planned.

    `model` may be wrapped (adapters, data parallelism). ValueError if it cannot run plans (see `plannable`).
    """
    reason = plannable(model)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot run an attention plan: {reason}")
    with _plugged_in(model), _in_force(plan):
        return model(input_ids=ids[None], position_ids=positions.unsqueeze(-2), use_cache=False, **extra)


def unplug(model: nn.Module) -> None:
    """Give the configurations inside `model` back the attention implementations that they name themselves.

    To be called after a backward pass: with gradient checkpointing they stay wrapped until then.
    """
    for config in _configs.get(pretrained(model), ()):  # pyright: ignore[reportArgumentType, reportCallIssue]
        config._attn_implementation_internal = config._attn_implementation_internal.removeprefix(_PREFIX)


def plannable(model: nn.Module) -> str | None:
    """None if the structure of `model` lets it run attention plans, otherwise the reason why not.

    A look at the structure only: whether the numbers agree is for the check at start-up to find out.
    """
    inner = pretrained(model)
    if inner is None:
        return "it is not a transformers model"
    config = inner.config.get_text_config(decoder=True)
    if getattr(inner.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(inner, "_is_stateful", False):
        return "it carries a recurrent state"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal"
    rope = _rope_types(config) & _WHOLE_CALL_ROPE
    if rope:
        return f"its {rope.pop()} rotary positions depend on the longest row of a call"
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _PLANNABLE_LAYERS)
    if kinds:
        return f"it has layers of type {', '.join(kinds)}"
    if not inner._can_set_attn_implementation() or "position_ids" not in arguments(inner):
        return "its attention does not go through transformers' attention interface"
    for part in _parts(model):
        if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None:
            return "it is compiled, for rectangular batches"
        adapters = getattr(part, "peft_config", None)
        if isinstance(adapters, dict) and any(getattr(c, "is_prompt_learning", False) for c in adapters.values()):
            return "its adapter puts virtual tokens in front of the prompt"
    return None


def attention_dropout(model: nn.Module) -> float:
    """The largest share of attention weights that a layer of `model` drops when it trains."""
    found = [0.0]
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            found += [v for name, v in vars(module).items() if "dropout" in name and isinstance(v, float)]
            layers = [(n, c.p) for n, c in module.named_children() if isinstance(c, nn.modules.dropout._DropoutNd)]
            found += [share for name, share in layers if "att" in name or name == "dropout"]
    return max(found)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """The model and what its wrappers (data parallelism, compilation, adapters) hold, outermost first."""
    part: Any = model
    while isinstance(part, nn.Module):
        yield part
        if hasattr(part, "get_base_model") and part.get_base_model() is not part:  # pyright: ignore
            part = part.get_base_model()  # pyright: ignore[reportCallIssue]
        else:
            part = getattr(part, "_orig_mod", None) or part._modules.get("module")


def pretrained(model: nn.Module) -> PreTrainedModel | None:
    """The transformers model under wrappers and adapters; None if there is none."""
    return next((part for part in _parts(model) if isinstance(part, PreTrainedModel)), None)


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary positions that a configuration names, for all layers or for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return {str(s.get("rope_type", s.get("type", "default"))) for s in nested}


def arguments(model: nn.Module) -> frozenset[str]:
    """What the forward pass of the transformers model in `model` may be given by name."""
    inner = pretrained(model)
    return frozenset() if inner is None else _parameters(type(inner))


@cache
def _parameters(kind: type[PreTrainedModel]) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


@contextmanager
def _in_force(plan: AttentionPlan) -> Iterator[None]:
    _in_use.append(plan)
    try:
        yield
    finally:
        _in_use.pop()


@contextmanager
def _plugged_in(model: nn.Module) -> Iterator[None]:
    """Wrap the attention implementations that the configurations inside `model` name.

    With gradient checkpointing they stay wrapped until `unplug`: layers are computed again when the call is long over.
    """
    inner = pretrained(model)
    assert inner is not None
    if inner not in _configs:
        _configs[inner] = _decoder_configs(inner)
    names = [config._attn_implementation_internal.removeprefix(_PREFIX) for config in _configs[inner]]
    for config, name in zip(_configs[inner], names):
        config._attn_implementation_internal = _wrapped(name)
    try:
        yield
    finally:
        if not (torch.is_grad_enabled() and is_checkpointing(inner)):
            for config, name in zip(_configs[inner], names):
                config._attn_implementation_internal = name


def _decoder_configs(inner: PreTrainedModel) -> list[Any]:
    """The configurations that the attention of the language model looks at; those of a vision tower are left alone."""
    text = inner.config.get_text_config(decoder=True)
    decoder = inner if text is inner.config else inner.get_decoder()
    configs = [text, *(c for module in decoder.modules() if (c := getattr(module, "config", None)) is not None)]
    found = {id(c): c for c in configs}.values()
    return [c for c in found if getattr(c, "_attn_implementation_internal", None) is not None]


def is_checkpointing(model: nn.Module) -> bool:
    """True if some layers of `model` are computed again in a backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _wrapped(name: str) -> str:
    """The name of the implementation that recognises plans and otherwise is the one called `name`."""
    wrapped = f"{_PREFIX}{name}"
    if wrapped in ALL_ATTENTION_FUNCTIONS:
        return wrapped

    def attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        if not isinstance(attention_mask, torch.Tensor) and isinstance(attention_mask, AttentionPlan):
            if torch.is_autocast_enabled(query.device.type):
                # Positions rotate queries and keys in float32; the library's own kernels bring all to one type too.
                dtype = torch.get_autocast_dtype(query.device.type)
                query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            call = _call(module, query, options)
            return attention_mask.attend(query[0], key[0], value[0], call).unsqueeze(0), None
        return _original(name, module)(module, query, key, value, attention_mask, **options)

    def mask(**arguments: Any) -> Any:
        if _in_use:
            return _in_use[-1]
        original = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(name)
        return original(**arguments) if original is not None else None

    AttentionInterface.register(wrapped, attention)
    AttentionMaskInterface.register(wrapped, mask)
    return wrapped


def _original(name: str, module: nn.Module) -> Any:
    """The attention function called `name`; the plain one lives in each model's own file."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _call(module: Any, query: torch.Tensor, options: dict[str, Any]) -> AttentionCall:
    scale = options.get("scaling")
    return AttentionCall(
        layer=int(module.layer_idx),
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        softcap=options.get("softcap"),
        window=options.get("sliding_window"),
        sinks=options.get("s_aux"),
        dropout=float(options.get("dropout") or 0.0),
    )
