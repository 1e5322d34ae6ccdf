"""Identifies weights by a digest that reads them once, so that two runs can be compared without storing weights."""

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
    named = list(parameters)
    sums: list[int | None] = [_sum_of_few(parameter.detach()) for _, parameter in named]
    others: dict[torch.device, list[torch.Tensor]] = {}
    for (_, parameter), found in zip(named, sums):
        if found is None:
            others.setdefault(parameter.device, []).append(_sum_of_bits(parameter.detach()))
    values = {device: iter(torch.stack(found).tolist()) for device, found in others.items()}  # one wait for a device
    lines = [
        f"{name} {parameter.dtype} {tuple(parameter.shape)} {next(values[parameter.device]) if own is None else own}\n"
        for (name, parameter), own in zip(named, sums)
    ]
    return hashlib.sha1("".join(lines).encode()).hexdigest()[:16]


def _sum_of_few(data: torch.Tensor) -> int | None:
    """The sum of bits of few float32 numbers on a CPU; None for other tensors."""
    count = data.numel()
    if data.dtype != torch.float32 or data.device.type != "cpu" or count > _SMALL or count % 2:
        return None
    return int(np.add.reduce(data.numpy().ravel().view(np.int64)))


def _sum_of_bits(data: torch.Tensor) -> torch.Tensor:
    flat = data.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # only an aligned storage can be read as longer integers
        flat = flat.clone()
    if missing := -flat.numel() % 8:
        whole = flat.numel() - 8 + missing
        last = torch.cat([flat[whole:], flat.new_zeros(missing)])  # a number of several bytes counts as a whole
        return flat[:whole].view(torch.int64).sum() + last.view(torch.int64).sum()
    return flat.view(torch.int64).sum()
