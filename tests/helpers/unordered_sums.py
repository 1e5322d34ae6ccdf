"""Detects floating-point sums whose order is not deterministic on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PUTS = (torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_)


class UnorderedSums(TorchDispatchMode):
    """Inside, records in `found` each operation that adds floats in the order in which CPU threads arrive.

    PyTorch's `index_put` does so for repeated indices from 32,768 elements on, unless deterministic algorithms are
    enabled; smaller ones are recorded too. Backward passes inside are recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _PUTS:
            into, indices = args[:2]
            adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            if adds and into.is_floating_point() and _has_repeats(indices):
                self.found.append((str(func), tuple(into.shape)))
        return func(*args, **kwargs)


def _has_repeats(indices: Sequence[torch.Tensor | None]) -> bool:
    """True if an index occurs twice. A None indexes a whole dimension."""
    given = torch.broadcast_tensors(*[index for index in indices if index is not None])
    stacked = torch.stack([index.flatten() for index in given])
    return stacked.unique(dim=1).shape[1] < stacked.shape[1]
