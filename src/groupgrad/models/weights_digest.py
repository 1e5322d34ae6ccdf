"""Computes a digest of weights in one pass over them, so that runs can be compared without storing weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

_SMALL = 1 << 16
"""Numbers of a tensor that NumPy sums in less time than torch, which has more to prepare."""


def weights_digest(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """16 hexadecimal digits of the bits of named parameters.

    Each tensor enters by the sum of its bits, read as 64-bit integers. Every change of one number changes the digest;
    two changes that cancel each other do not.
    """
    return WeightsDigest(parameters).value(trained_only=False)


class WeightsDigest:
    """The `weights_digest` of the same parameters again and again, whose numbers change in between.

    Views of small parameters are kept, and with them their memory.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]):
        self._weights = [_Weight(name, parameter) for name, parameter in parameters]

    def value(self, *, trained_only: bool) -> str:
        """The digest of all parameters, or of those with a gradient."""
        weights = [weight for weight in self._weights if weight.parameter.requires_grad or not trained_only]
        sums = [weight.sum_of_few() for weight in weights]
        others: dict[torch.device, list[torch.Tensor]] = {}
        for weight, found in zip(weights, sums):
            if found is None:
                others.setdefault(weight.parameter.device, []).append(_sum_of_bits(weight.parameter.detach()))
        values = {device: iter(torch.stack(found).tolist()) for device, found in others.items()}  # one wait each
        lines = [
            f"{weight.header} {next(values[weight.parameter.device]) if summed is None else summed}\n"
            for weight, summed in zip(weights, sums)
        ]
        return hashlib.sha1("".join(lines).encode()).hexdigest()[:16]


class _Weight:
    """A parameter with its name, and its bits where they are summed by NumPy."""

    def __init__(self, name: str, parameter: nn.Parameter):
        self.parameter, self._name = parameter, name
        self._read_header()

    def _read_header(self) -> None:
        data = self.parameter.detach()
        self.header = f"{self._name} {data.dtype} {tuple(data.shape)}"
        self._words, self._address, count = None, 0, data.numel()
        is_plain = data.dtype == torch.float32 and data.device.type == "cpu" and data.is_contiguous()
        if is_plain and count <= _SMALL and count % 2 == 0:
            self._words, self._address = data.numpy().reshape(-1).view(np.int64), data.data_ptr()

    def sum_of_few(self) -> int | None:
        """The sum of bits of few float32 numbers on a CPU; None for other tensors."""
        if self._words is None or self.parameter.data_ptr() != self._address:
            self._read_header()  # the numbers may have moved
        return None if self._words is None else int(np.add.reduce(self._words))


def _sum_of_bits(data: torch.Tensor) -> torch.Tensor:
    flat = data.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # only an aligned storage can be read as longer integers
        flat = flat.clone()
    if missing := -flat.numel() % 8:
        whole = flat.numel() - 8 + missing
        last = torch.cat([flat[whole:], flat.new_zeros(missing)])  # a number of several bytes counts as a whole
        return flat[:whole].view(torch.int64).sum() + last.view(torch.int64).sum()
    return flat.view(torch.int64).sum()
