"""Routes the recurrent layers of transformers models through a `Recurrence` for the length of a pass.

The model files of transformers compute recurrences in a few functions (`causal_conv1d_fn`,
`torch_chunk_gated_delta_rule`, ...), which are globals of the file. Each is wrapped once: the wrapper calls the
function's counterpart in `recurrent_scans` while a `Recurrence` is active, and the original otherwise. The layers'
`forward` is wrapped too: the wrapper computes long rows in stretches. No model file is copied.
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
from groupgrad.integrations.recurrent.stretches import Carried, Stretch, cut
from groupgrad.memory.oom_retry import STRETCH_TOKENS, is_long
from groupgrad.models.recurrent_classes import recurrent_classes, recurrent_functions
from groupgrad.models.shards import is_zero_sharded
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

_stretches: WeakKeyDictionary[Recurrence, list[Stretch]] = WeakKeyDictionary()
"""Recurrences of passes whose layers may be cut -> their stretches, made when a long row is computed."""


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
        _wrap_layer(cls)
    if type(order) is Recurrence:  # sampling cuts its prompts itself
        _stretches.setdefault(order, [])
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


def _wrap_layer(cls: type[nn.Module]) -> None:
    original = cls.forward
    if original in _wrappers:
        return

    @functools.wraps(original)
    def wrapper(module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        order = _present()
        if order is None:
            return original(module, hidden_states, *args, **kwargs)

        def compute(states: torch.Tensor) -> Any:
            return original(module, states, *args, **kwargs)

        if order not in _stretches or not is_long(hidden_states) or is_zero_sharded(module):
            return compute(hidden_states)  # under ZeRO-3 all ranks have to call the layer's modules equally often
        can_cut = all(map(_is_for_all_tokens, (*args, *kwargs.values())))
        return _in_stretches(order, compute, hidden_states) if can_cut else compute(hidden_states)

    _wrappers.add(wrapper)
    cls.forward = wrapper


def _is_for_all_tokens(option: object) -> bool:
    """True for an argument of a layer that has no value per token, so that every stretch can take it."""
    return option is None or isinstance(option, (bool, int, float, str))


def _in_stretches(order: Recurrence, compute: Callable[[torch.Tensor], Any], hidden_states: torch.Tensor) -> Any:
    """A layer's output (1, T, H), computed stretch by stretch."""
    stretches = _stretches[order]
    if not stretches:
        stretches += cut(order.spans, STRETCH_TOKENS)
    outputs: list[Any] = []
    carried: Carried = []
    for stretch, states in zip(stretches, hidden_states.split([part.num_tokens for part in stretches], dim=1)):
        stretch.begin_layer(carried)
        _running.orders.append(stretch)
        try:
            outputs.append(compute(states))
        finally:
            _running.orders.pop()
            stretch.begin_layer([])
    if isinstance(outputs[0], tuple):
        return torch.cat([output for output, *_ in outputs], dim=1), *outputs[0][1:]
    return torch.cat(outputs, dim=1)
