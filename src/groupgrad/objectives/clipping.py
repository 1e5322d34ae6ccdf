"""The clipped surrogate, which `grpo` and its relatives average in different ways, and what it measures."""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.metrics import Metric
from groupgrad.objectives.measure import maximum_where, mean_where, minimum_where
from groupgrad.objectives.method import PolicyTerms, TokenLoss
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.ragged import PerRow, PerToken, row_mean, token_advantages

CLIP_SETTINGS = ("delta", "epsilon", "epsilon_high")
"""Fields of the configuration that the clipped surrogate reads."""

CLIP_METRICS = tuple(f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean"))
"""Names of the metrics of the clipped surrogate."""


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> torch.Tensor:
    """-min(c A, clip(c, 1 - epsilon, 1 + epsilon_high) A), with c at most `delta` on the unclipped side.

    No gradient where the clipped side is the smaller. Source: arXiv:2402.03300, eq. 3; separate upper width:
    arXiv:2503.14476, eq. 8; delta: arXiv:2505.07291, two-sided clipping.
    """
    inside = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = limited(ratio, delta)
    return -torch.minimum(bounded * advantages, inside * advantages)


def limited(ratio: torch.Tensor, ceiling: float | None) -> torch.Tensor:
    """The ratio, at most `ceiling`; unchanged if that is None."""
    return ratio if ceiling is None else ratio.clamp(max=ceiling)


def clipped_ratio(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
    """`clipped` of each token, with the widths of the options and the metrics `CLIP_METRICS`."""
    loss = clipped(terms.token_ratio, terms.token_advantages, options.epsilon, options.epsilon_high, options.delta)
    kind = type(terms.ratio)
    bounded = kind(limited(terms.ratio.values.detach(), options.delta))
    return TokenLoss(loss, clip_metrics(bounded, terms.batch, options.epsilon, options.epsilon_high))


def clip_metrics(ratio: PerToken | PerRow, batch: Batch, epsilon: float, epsilon_high: float) -> dict[str, Metric]:
    """The `clip_ratio/...` metrics: shares of loss tokens, or of sequences for a sequence ratio, that were clipped.

    Low is a ratio below 1 - epsilon under a negative advantage, high one above 1 + epsilon_high under a positive one,
    region either. The extremes are over completions; a completion without loss tokens counts nowhere.
    """
    per_token = isinstance(ratio, PerToken)
    signs = token_advantages(batch) if per_token else batch.advantages
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
