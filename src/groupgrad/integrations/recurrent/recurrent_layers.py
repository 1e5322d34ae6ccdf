"""Routes the recurrent layers of transformers models through a `Recurrence` for the length of a pass.

The model files of transformers compute recurrences in a few functions (`causal_conv1d_fn`,
`torch_chunk_gated_delta_rule`, ...), which are globals of the file. Each is wrapped once: the wrapper calls the
function's counterpart in `recurrent_scans` while a `Recurrence` is active, and the original otherwise. No model file is
copied.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from groupgrad.integrations.recurrent import recurrent_packages, recurrent_scans
from groupgrad.models.recurrent_classes import recurrent_classes, recurrent_functions
from groupgrad.scoring.recurrence import Recurrence


def _not_fused(*_: object, **__: object) -> None:
    """Returns None in place of a fused kernel, so that the layer calls the convolution and the scan separately."""


_COUNTERPARTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": recurrent_scans.causal_conv1d,
    "torch_chunk_gated_delta_rule": recurrent_scans.gated_delta_rule,
    "mamba2_chunk_scan": recurrent_scans.mamba2_scan,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
"""Each of `RECURRENT_FUNCTIONS` -> its counterpart for flat tokens."""


_wrappers: set[Callable[..., Any]] = set()


class _Passes(threading.local):
    """The recurrences of the passes that a thread runs, innermost last."""

    def __init__(self) -> None:
        self.orders: list[Recurrence] = []


_running = _Passes()

_kept: WeakKeyDictionary[nn.Module, Recurrence] = WeakKeyDictionary()
"""The recurrence of the last pass of a model whose layers a backward pass computes again."""


@contextmanager
def routed(model: nn.Module, order: Recurrence, *, keep: bool) -> Iterator[None]:
    """Makes the recurrent layers of `model` compute with `order` inside the context.

    With `keep` they also do so in backward passes, where checkpointing computes layers again, until
    `drop_kept_recurrence`.
    """
    for cls in recurrent_classes(model):
        for name in recurrent_functions(cls):
            _wrap(inspect.unwrap(cls.forward).__globals__, name)
    _running.orders.append(order)
    if keep:
        _kept.pop(model, None)  # the last entry of the dict has to be the last pass
        _kept[model] = order
    order.begin_pass()
    try:
        yield
    finally:
        _running.orders.pop()


def drop_kept_recurrence(model: nn.Module) -> None:
    """Drops the recurrence that `routed` has kept for backward passes of `model`."""
    _kept.pop(model, None)


def _present() -> Recurrence | None:
    """The recurrence of the running pass; inside a backward pass the one that `routed` kept last; else None."""
    if _running.orders:
        return _running.orders[-1]
    is_backward = torch._C._current_graph_task_id() != -1
    return list(_kept.values())[-1] if _kept and is_backward else None


def _wrap(namespace: dict[str, Any], name: str) -> None:
    original = namespace[name]
    if original in _wrappers:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        order = _present()
        if order is None:
            return original(*args, **kwargs)
        # Rounding of products adds up in a state, so autocast does not touch them.
        with torch.autocast(args[0].device.type, enabled=False):
            if not order.is_step and recurrent_packages.is_usable(name, args[0]):
                return recurrent_packages.by_package(original, name, order, *args, **kwargs)
            return _COUNTERPARTS[name](order, *args, **kwargs)

    _wrappers.add(wrapper)
    namespace[name] = wrapper
