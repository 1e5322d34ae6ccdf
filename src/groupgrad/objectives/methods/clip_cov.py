r"""Clip-Cov: the clipped surrogate of `grpo`, without the gradient of a few tokens of high covariance.

Over the tokens of the optimizer step, the covariance of a token is

$$Cov_{i,t} = (\log\pi_{i,t} - mean(\log\pi))\,(A_{i,t} - mean(A))$$

Tokens that are likely and good drive the entropy down. Of those with a covariance from `low` to `high`, a share `share`
of all tokens is drawn at random, at least one, and trains nothing. Averaged over all tokens of the step. In later steps
of a generation batch the covariances take a forward pass of the step's rows.

The paper's scripts clip ratios at 0 and 2. Its code, as that of verl and SkyRL, draws no token that the clip has taken
out; here such a token may be drawn, and counts among the share.

Worked: `probs=[[0.9], [0.9], [0.01]], advantages=[1, 0, -1], low=2` gives `gradient=[[-0.333], [0], [0]],
metrics={"clip_cov/selected_mean": 0.333}`: the covariances are 1.5, 0 and 3.

When: entropy collapses before the reward is learnt.

Source: arXiv:2505.22617; share, bounds and the clip as in the paper's code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.measure import mean_where
from groupgrad.objectives.method import Method, PolicyTerms, StepTokens, TokenLoss, covariances, num_of
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.registry import FRACTION, setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of Clip-Cov."""

    share: float = setting(0.0002, FRACTION, "is no part of the tokens")
    """Share of the step's tokens that train nothing."""
    low: float = 1.0
    """Smallest covariance of a token that may be drawn."""
    high: float = 5.0
    """Largest covariance of a token that may be drawn."""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(
                f"loss_settings has low={self.low} and high={self.high}, which no covariance is between. Set low below "
                "high"
            )


def draw(tokens: StepTokens, options: PolicyOptions, generator: torch.Generator) -> torch.Tensor:
    """(N,) bool, the tokens that train nothing."""
    settings, found = options.settings or Settings(), covariances(tokens)
    eligible = ((found >= settings.low) & (found <= settings.high)).nonzero().flatten()
    count = min(num_of(settings.share, len(found)), len(eligible))
    in_order = eligible[found[eligible].argsort(stable=True)]  # the same whichever rank has which tokens
    chosen = in_order[torch.randperm(len(eligible), generator=generator)[:count]]
    return torch.zeros(len(found), dtype=torch.bool).index_fill(0, chosen, True)


def clipped_and_counted(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
    """The clipped surrogate, and the share of tokens that were drawn."""
    result, selected = clipped_ratio(terms, options), terms.batch.selected
    drawn = torch.zeros_like(terms.batch.trained) if selected is None else selected
    share = mean_where(drawn.float(), terms.batch.trained)
    return TokenLoss(result.per_token, {**result.metrics, "clip_cov/selected_mean": share})


METHOD = Method(
    clipped_and_counted,
    "token_mean",
    reads=CLIP_SETTINGS,
    settings=Settings,
    select=draw,
    leaves_out_selected=True,
    grows_with_ratio="negative",
    metrics=(*CLIP_METRICS, "clip_cov/selected_mean"),
)
