r"""KL-Cov: the ratio times the advantage, with a penalty on a few tokens of the highest covariance.

The share `share` of the step's tokens with the highest covariances (see `clip_cov`), at least one, is held near the old
policy:

$$\ell_{i,t} = -c_{i,t} A_{i,t} + \beta\,|\log\pi_{i,t} - \log\pi^{old}_{i,t}|$$

with `coef` for beta; all others have the first term alone, without a clip. Averaged over all tokens of the step. In
later steps of a generation batch the covariances take a forward pass of the step's rows. In an on-policy step the
penalty is 0, and so is its gradient; a difference of up to 1e-5 nats is rounding, and counts as none.

Worked: `ratios=[[2]], advantages=[1]` gives `loss=-1.307, gradient=[[-1]], metrics={"kl_cov/selected_mean": 1}`.

When: as `clip_cov`; the penalty acts from the second step of a generation batch on.

Source: arXiv:2505.22617; share, penalty and its weight as in the paper's code, which has a share of 0.002 for models of
7B and 0.0002 for 32B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.objectives.measure import mean_where
from groupgrad.objectives.method import Method, PolicyTerms, StepTokens, TokenLoss, covariances, num_of
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.registry import FRACTION, MORE_THAN_0, setting
from groupgrad.objectives.terms import ROUNDING_NATS


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of KL-Cov."""

    share: float = setting(0.0002, FRACTION, "is no part of the tokens")
    """Share of the step's tokens that have the penalty."""
    coef: float = setting(1.0, MORE_THAN_0, "is no penalty")
    """Weight of the penalty."""


def highest(tokens: StepTokens, options: PolicyOptions, generator: torch.Generator) -> torch.Tensor:
    """(N,) bool, the tokens that have the penalty; covariances that are equal but for rounding have it together."""
    found = covariances(tokens)
    count = num_of((options.settings or Settings()).share, len(found))
    if count == 0:
        return torch.zeros_like(found, dtype=torch.bool)
    least = found.sort(descending=True).values[count - 1]
    return found >= least - ROUNDING_NATS * least.abs().clamp(min=1)


def held_where_selected(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
    """-c A, with the penalty on the tokens selected."""
    selected = terms.batch.selected
    if selected is None:
        selected = torch.zeros_like(terms.batch.trained)
    drift = terms.log_ratio.abs()
    penalty = torch.where(selected & (drift > ROUNDING_NATS), options.settings.coef * drift, torch.zeros_like(drift))
    loss = -terms.token_ratio * terms.token_advantages + penalty
    return TokenLoss(loss, {"kl_cov/selected_mean": mean_where(selected.float(), terms.batch.trained)})


METHOD = Method(
    held_where_selected,
    "token_mean",
    settings=Settings,
    level="token",
    select=highest,
    grows_with_ratio="always",
    metrics=("kl_cov/selected_mean",),
)
