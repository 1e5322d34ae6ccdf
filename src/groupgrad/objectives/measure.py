"""Metrics over a part of the tokens or rows. They stay on the device: measuring does not wait for it."""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.metrics import Metric, maximum, mean_of, minimum
from groupgrad.objectives.ragged import PerRow, PerToken


def counted(values: PerToken | PerRow, batch: Batch) -> torch.Tensor:
    """Elements that count in a metric, bool: the loss tokens (L,), or the rows (B,) that have any."""
    return batch.trained if isinstance(values, PerToken) else batch.loss_tokens > 0


def mean_where(values: torch.Tensor, counts: torch.Tensor) -> Metric:
    """The mean of the values where `counts`, a bool of their shape; nothing measured if it is nowhere true."""
    return mean_of(torch.where(counts, values, torch.zeros_like(values)).sum(), counts.sum())


def minimum_where(values: torch.Tensor, counts: torch.Tensor) -> Metric:
    """The smallest of the values where `counts`; nothing measured if it is nowhere true."""
    return minimum(_least(values, counts))


def maximum_where(values: torch.Tensor, counts: torch.Tensor) -> Metric:
    """The largest of the values where `counts`; nothing measured if it is nowhere true."""
    return maximum(-_least(-values, counts))


def _least(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """() the smallest value counted; NaN if there is none."""
    if values.numel() == 0:
        return values.new_full((), torch.nan)
    least = torch.where(counts, values, torch.full_like(values, torch.inf)).min()
    return torch.where(counts.any(), least, torch.full_like(least, torch.nan))
