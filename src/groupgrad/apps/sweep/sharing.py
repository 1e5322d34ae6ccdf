"""Shares the memory of frozen weights between arms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PLAIN_TENSORS = (torch.Tensor,)
"""Classes of tensors that are nothing but their numbers; quantized and sharded weights have others."""


class SharedWeights:
    """Frozen weights of the arms' models, each distinct tensor once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def share(self, model: nn.Module) -> None:
        """Replaces the frozen weights of a model by equal ones that are known on their device.

        Only weights without a gradient are shared, since nothing writes to them, and only those that are equal bit for
        bit.
        """
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.requires_grad or type(tensor.data) not in _PLAIN_TENSORS:
                continue
            kind = name, tensor.device, tuple(tensor.shape), tensor.dtype, tensor.stride()
            same_kind = self._known.setdefault(kind, [])
            kept = next((kept for kept in same_kind if _equal_bits(kept, tensor)), None)
            if kept is None:
                same_kind.append(tensor.data)
            else:
                tensor.data = kept


def _equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))
