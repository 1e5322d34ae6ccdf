"""Additions whose order is left to chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PUTS = (torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_)


class UnorderedSums(TorchDispatchMode):
    """Notes in `found` what inside adds floating numbers up in the order in which a CPU's threads come by.

    PyTorch's `index_put` does so from 32,768 numbers on where places repeat, unless deterministic algorithms are asked
    for; fewer numbers are noted too. Backward passes count where they are made inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _PUTS:
            into, places = args[:2]
            adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            if adds and into.is_floating_point() and _repeats(places):
                self.found.append((str(func), tuple(into.shape)))
        return func(*args, **kwargs)


def _repeats(places: Sequence[torch.Tensor | None]) -> bool:
    """True if some place is named twice; dimensions that none of `places` is for have no say."""
    named = torch.stack([p.flatten() for p in torch.broadcast_tensors(*[p for p in places if p is not None])])
    return named.unique(dim=1).shape[1] < named.shape[1]
