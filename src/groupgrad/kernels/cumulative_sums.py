"""Cumulative sums for GPUs under deterministic algorithms (`full_determinism`), where PyTorch refuses its own."""

from __future__ import annotations

import torch


def cumulative_sum(values: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Computes `values.cumsum(dim)` of floating-point numbers, of the same shape.

    PyTorch refuses it on a GPU under deterministic algorithms. There each of log2(n) steps adds to every number the
    number 1, 2, 4, ... places before it.
    """
    if not (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return values.cumsum(dim)
    length, step = values.shape[dim], 1
    while step < length:
        added = values.narrow(dim, step, length - step) + values.narrow(dim, 0, length - step)
        values, step = torch.cat([values.narrow(dim, 0, step), added], dim), 2 * step
    return values
