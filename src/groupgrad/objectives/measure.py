"""Metrics over a part of the tokens or rows. They stay on the device: measuring does not wait for it."""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.metrics import Metric, maximum, mean_of, minimum
from groupgrad.objectives.ragged import PerRow, PerToken, broadcast_to_tokens, row_mean

CLIP_METRICS = tuple(f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean"))
"""Names of the metrics of the clipped surrogate."""


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


def clip_metrics(ratio: PerToken | PerRow, batch: Batch, epsilon: float, epsilon_high: float) -> dict[str, Metric]:
    """The `clip_ratio/...` metrics: shares of loss tokens, or of sequences for a sequence ratio, that were clipped.

    Low is a ratio below 1 - epsilon under a negative advantage, high one above 1 + epsilon_high under a positive one,
    region either. The extremes are over completions; a completion without loss tokens counts nowhere.
    """
    per_token = isinstance(ratio, PerToken)
    signs = broadcast_to_tokens(PerRow(batch.advantages), batch) if per_token else batch.advantages
    low = ((ratio.values < 1 - epsilon) & (signs < 0)).float()
    high = ((ratio.values > 1 + epsilon_high) & (signs > 0)).float()
    rows = batch.loss_tokens > 0
    counts = batch.trained if per_token else rows
    return {
        "clip_ratio/low_mean": mean_where(low, counts),
        "clip_ratio/low_min": minimum_where(row_mean(low, batch) if per_token else low, rows),
        "clip_ratio/high_mean": mean_where(high, counts),
        "clip_ratio/high_max": maximum_where(row_mean(high, batch) if per_token else high, rows),
        "clip_ratio/region_mean": mean_where(low + high, counts),
    }


def ceiling_metrics(ratio: PerToken | PerRow, batch: Batch, ceiling: float) -> dict[str, Metric]:
    """`cispo_clip_ratio`: share of loss tokens (or sequences) with a ratio above the ceiling and positive advantage."""
    signs = broadcast_to_tokens(PerRow(batch.advantages), batch) if isinstance(ratio, PerToken) else batch.advantages
    above = (ratio.values > ceiling) & (signs > 0)
    return {"cispo_clip_ratio": mean_where(above.float(), counted(ratio, batch))}
