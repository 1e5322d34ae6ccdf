"""Weights that live in host memory and visit a device for the time of a computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class HostWeights:
    """The weights of a frozen model, kept in host memory; inside `on_device()` they are on `device`.

    The copies on the device are dropped afterwards and nothing is copied back, as nothing has changed. What the model
    made anew there (a table of positions, say) is brought to host memory.
    """

    def __init__(self, model: nn.Module, device: torch.device | str):
        self._model, self._device = model.to("cpu"), torch.device(device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The model on its device inside, back in host memory afterwards, also on errors."""
        at_home: dict[int, torch.Tensor] = {}
        try:
            for tensor in self._tensors():
                at_home[id(tensor)] = tensor.data
                tensor.data = self.to_device(tensor.data)
            yield
        finally:
            for tensor in self._tensors():
                kept = at_home.get(id(tensor))
                tensor.data = tensor.data.to("cpu") if kept is None else kept

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor on the device."""
        return tensor.to(self._device)

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]
