"""Tells which layers of a model are recurrent and can be computed over flat tokens: delta rules, Mamba-2, convolutions.

`integrations/recurrent` computes these layers, and is imported when a model has some. Models with other recurrences
(Mamba, Kimi's delta attention, RecurrentGemma) train in the dense layout.
"""

from __future__ import annotations

import inspect
from functools import cache
from weakref import WeakKeyDictionary

from torch import nn

RECURRENT_FUNCTIONS = frozenset(
    {
        "causal_conv1d_fn",
        "torch_chunk_gated_delta_rule",
        "mamba2_chunk_scan",
        "mamba2_split_conv1d_scan_combined",
    }
)
"""Functions in transformers' model files that compute a recurrence."""

_OTHER_FUNCTIONS = frozenset({"chunk_kimi_delta_attention", "mamba_selective_scan", "mamba_inner_fn"})
"""Functions that compute one which has no counterpart for flat tokens."""

_classes: WeakKeyDictionary[nn.Module, list[type[nn.Module]]] = WeakKeyDictionary()


def recurrent_classes(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of recurrent layers in `model`; decode steps ask often, so they are looked up once."""
    if model not in _classes:
        kinds = {type(module) for module in model.modules()}
        _classes[model] = [cls for cls in kinds if recurrent_functions(cls)]
    return _classes[model]


@cache
def recurrent_functions(cls: type[nn.Module]) -> frozenset[str]:
    """Names of the `RECURRENT_FUNCTIONS` that layers of a class call."""
    function = inspect.unwrap(cls.forward)
    code = getattr(function, "__code__", None)
    if code is None or not _OTHER_FUNCTIONS.isdisjoint(code.co_names):
        return frozenset()
    return frozenset(code.co_names) & RECURRENT_FUNCTIONS & function.__globals__.keys()
