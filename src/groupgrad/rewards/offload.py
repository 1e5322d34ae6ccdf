"""Offloading of a reward model: weights stay in host memory and are copied to the device for each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class HostWeights:
    """Keeps the weights of a frozen model in host memory, and on `device` inside `on_device()`.

    The device copies are dropped afterwards; nothing is copied back, since frozen weights do not change. Buffers that
    the model has created in between, such as a position table, are moved to host memory.
    """

    def __init__(self, model: nn.Module, device: torch.device | str):
        self._model, self._device = model.to("cpu"), torch.device(device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which the model is on its device; afterwards, also on errors, it is back in host memory."""
        host_data: dict[int, torch.Tensor] = {}
        try:
            for tensor in self._tensors():
                host_data[id(tensor)] = tensor.data
                tensor.data = self.to_device(tensor.data)
            yield
        finally:
            for tensor in self._tensors():
                data = host_data.get(id(tensor))
                tensor.data = tensor.data.to("cpu") if data is None else data

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the tensor on the device."""
        return tensor.to(self._device)

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]
