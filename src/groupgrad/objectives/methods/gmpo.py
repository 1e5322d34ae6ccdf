r"""GMPO: completions are weighed by the geometric mean of their tokens' clipped ratios, and count once each.

The logarithm of a ratio is at most `clip` where A > 0, and at least -`clip` where A < 0, where nothing bounds the
weight from above. Only tokens that no mask takes out are in the mean. All tokens of a completion have one weight:

$$\ell_{i,t} = -A_i \exp\left(\frac{1}{T_i} \sum_t \log c_{i,t}\right)$$

Worked: `ratios=[[2, 0.5, 0.5]], advantages=[1]` gives `loss=-0.72, gradient=[[0, -0.24, -0.24]],
metrics={"gmpo/clipped_mean": 0.333}`.

When: several steps a generation batch, without single tokens that dominate.

Source: arXiv:2507.20673, eq. 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.objectives.measure import mean_where
from groupgrad.objectives.method import Method, PolicyTerms, TokenLoss
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.ragged import PerRow, broadcast_to_tokens, row_sum
from groupgrad.objectives.registry import MORE_THAN_0, setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of GMPO."""

    clip: float = setting(0.4, MORE_THAN_0, "leaves no ratio but 1")
    """Bound of a token's log-ratio, nats."""


def geometric_mean(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
    """-A exp(m) of each token, the same for all tokens of a completion."""
    clip, log_ratio = options.settings.clip, terms.log_ratio
    sign = terms.token_advantages.sign()
    bounded = torch.where(sign > 0, log_ratio.clamp(max=clip), log_ratio.clamp(min=-clip))
    counts = terms.kept & (sign != 0)  # a turn without an advantage weakens no other turn of the row
    count = row_sum(counts.to(log_ratio.dtype), terms.batch).clamp(min=1)
    mean = row_sum(torch.where(counts, bounded, torch.zeros_like(bounded)), terms.batch) / count
    is_clipped = (bounded != log_ratio) & (sign != 0)
    metrics = {"gmpo/clipped_mean": mean_where(is_clipped.float(), terms.batch.trained)}
    weight = broadcast_to_tokens(PerRow(mean.exp()), terms.batch)
    return TokenLoss(-weight * terms.token_advantages, metrics)


METHOD = Method(geometric_mean, "sequence_mean", settings=Settings, level="token", metrics=("gmpo/clipped_mean",))
