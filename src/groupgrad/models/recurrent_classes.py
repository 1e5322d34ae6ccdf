"""Tells which layers of a model are recurrent: delta rules, state-space scans, short convolutions.

`integrations/recurrent` computes these layers, and is imported when a model has some.
"""

from __future__ import annotations

import inspect
from functools import cache
from weakref import WeakKeyDictionary

from torch import nn

from groupgrad.models.families import is_transformers_class

RECURRENT_FUNCTIONS = frozenset(
    {
        "causal_conv1d_fn",
        "torch_chunk_gated_delta_rule",
        "chunk_kimi_delta_attention",
        "mamba2_chunk_scan",
        "mamba_selective_scan",
        "mamba2_split_conv1d_scan_combined",
        "mamba_inner_fn",
    }
)
"""Functions in transformers' model files that compute a recurrence."""

RECURRENT_LAYERS = frozenset({"MiniMaxLightningAttention"})
"""Classes of layers that compute a recurrence in `forward` itself."""

_classes: WeakKeyDictionary[nn.Module, list[type[nn.Module]]] = WeakKeyDictionary()


def recurrent_classes(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of recurrent layers in `model`; decode steps ask often, so they are looked up once."""
    if model not in _classes:
        kinds = {type(module) for module in model.modules()}
        _classes[model] = [cls for cls in kinds if recurrent_functions(cls) or is_recurrent_class(cls)]
    return _classes[model]


def is_recurrent_class(cls: type[nn.Module]) -> bool:
    """True if layers of a class compute their recurrence themselves (`RECURRENT_LAYERS`)."""
    return cls.__name__ in RECURRENT_LAYERS and is_transformers_class(cls)


@cache
def recurrent_functions(cls: type[nn.Module]) -> frozenset[str]:
    """Names of the `RECURRENT_FUNCTIONS` that layers of a class call."""
    function = inspect.unwrap(cls.forward)
    code = getattr(function, "__code__", None)
    if code is None:
        return frozenset()
    return frozenset(code.co_names) & RECURRENT_FUNCTIONS & function.__globals__.keys()
