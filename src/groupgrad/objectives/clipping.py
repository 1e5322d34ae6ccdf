"""How much of a micro-batch the clip held back, as metrics."""

from __future__ import annotations

import torch

from groupgrad.metrics import Metric, maximum, mean_of, minimum
from groupgrad.objectives.ragged import Layout, PerRow, PerToken, row_mean, spread


def clip_metrics(
    ratio: PerToken | PerRow, advantages: torch.Tensor, layout: Layout, epsilon: float, epsilon_high: float
) -> dict[str, Metric]:
    """The `clip_ratio/...` metrics: shares of loss tokens, or of sequences for a sequence ratio, that were clipped.

    Low is a ratio below 1 - epsilon under a negative advantage, high one above 1 + epsilon_high under a positive one,
    region either. The extremes are over completions; a completion without loss tokens counts nowhere.
    """
    signs = _advantages_of(ratio, advantages, layout)
    low = (ratio.values < 1 - epsilon) & (signs < 0)
    high = (ratio.values > 1 + epsilon_high) & (signs > 0)
    low_shares = _share_of_rows(_like(ratio, low), layout)
    high_shares = _share_of_rows(_like(ratio, high), layout)
    return {
        "clip_ratio/low_mean": _mean(_like(ratio, low), layout),
        "clip_ratio/low_min": minimum(_extreme(low_shares, layout, torch.inf)),
        "clip_ratio/high_mean": _mean(_like(ratio, high), layout),
        "clip_ratio/high_max": maximum(_extreme(high_shares, layout, -torch.inf)),
        "clip_ratio/region_mean": _mean(_like(ratio, low | high), layout),
    }


def ceiling_metrics(
    ratio: PerToken | PerRow, advantages: torch.Tensor, layout: Layout, ceiling: float
) -> dict[str, Metric]:
    """`cispo_clip_ratio`: share of loss tokens (or sequences) with a ratio above the ceiling and positive advantage."""
    above = (ratio.values > ceiling) & (_advantages_of(ratio, advantages, layout) > 0)
    return {"cispo_clip_ratio": _mean(_like(ratio, above), layout)}


def mean_over_rows(values: torch.Tensor, layout: Layout) -> Metric:
    """The mean of (B,) values over the rows that have loss tokens."""
    return _mean(PerRow(values), layout)


def mean_over_tokens(values: torch.Tensor, layout: Layout) -> Metric:
    """The mean of (L,) values over the loss tokens."""
    return _mean(PerToken(values), layout)


def _mean(values: PerToken | PerRow, layout: Layout) -> Metric:
    counted = _counted(values, layout)
    total = torch.where(counted, values.values, torch.zeros_like(values.values)).sum()
    return mean_of(total, counted.sum())


def _counted(values: PerToken | PerRow, layout: Layout) -> torch.Tensor:
    return layout.trained if isinstance(values, PerToken) else layout.counts > 0


def _like(ratio: PerToken | PerRow, values: torch.Tensor) -> PerToken | PerRow:
    return PerToken(values) if isinstance(ratio, PerToken) else PerRow(values)


def _advantages_of(ratio: PerToken | PerRow, advantages: torch.Tensor, layout: Layout) -> torch.Tensor:
    return spread(PerRow(advantages), layout) if isinstance(ratio, PerToken) else advantages


def _share_of_rows(hits: PerToken | PerRow, layout: Layout) -> torch.Tensor:
    values = hits.values.float()
    return row_mean(values, layout) if isinstance(hits, PerToken) else values


def _extreme(shares: torch.Tensor, layout: Layout, neutral: float) -> torch.Tensor:
    """The smallest (`neutral` inf) or largest (-inf) share over rows with loss tokens; NaN if there are none."""
    if shares.numel() == 0:
        return shares.new_full((), torch.nan)
    shares = torch.where(layout.counts > 0, shares, torch.full_like(shares, neutral))
    extreme = shares.min() if neutral > 0 else shares.max()
    return torch.where(extreme.isfinite(), extreme, torch.full_like(extreme, torch.nan))
