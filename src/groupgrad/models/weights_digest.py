"""Computes a digest of weights in one pass over them, so that runs can be compared without storing weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn


def weights_digest(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """16 hexadecimal digits of the bits of named parameters.

    Each tensor enters by the sum of its bits, read as 64-bit integers. Every change of one number changes the digest;
    two changes that cancel each other do not.
    """
    named = [(name, parameter.detach()) for name, parameter in parameters]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for _, data in named:
        sums.setdefault(data.device, []).append(_sum_of_bits(data))
    values = {device: iter(torch.stack(found).tolist()) for device, found in sums.items()}  # one wait each
    lines = [f"{name} {data.dtype} {tuple(data.shape)} {next(values[data.device])}\n" for name, data in named]
    return hashlib.sha1("".join(lines).encode()).hexdigest()[:16]


def _sum_of_bits(data: torch.Tensor) -> torch.Tensor:
    flat = data.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # only an aligned storage can be read as longer integers
        flat = flat.clone()
    if missing := -flat.numel() % 8:
        whole = flat.numel() - 8 + missing
        last = torch.cat([flat[whole:], flat.new_zeros(missing)])  # a number of several bytes counts as a whole
        return flat[:whole].view(torch.int64).sum() + last.view(torch.int64).sum()
    return flat.view(torch.int64).sum()
