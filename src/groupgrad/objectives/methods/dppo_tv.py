r"""DPPO, binary TV: a token is left out once its probability is too far from the sampler's, in the wrong direction.

With the probability mu that the sampler gave the token and r = pi / mu, the loss of a token is 0 where A > 0 and
pi - mu > `threshold`, or A < 0 and mu - pi > `threshold`, and elsewhere

$$\ell_{i,t} = -sg\left(\min(r_{i,t}, ceiling)\right) A_i \log\pi_{i,t}$$

So rare tokens, whose ratios are large before their probabilities are, keep a gradient. Where vLLM samples, its
correction is in r already.

Worked: `probs=[[0.6, 0.8]], ratios=[[1.2, 1.6]], advantages=[1]` gives `gradient=[[-0.6, 0]],
metrics={"dppo/masked_mean": 0.5}`;
`probs=[[0.6, 0.8]], ratios=[[1.2, 1.6]], advantages=[-1], ceiling=1.5` gives `gradient=[[0.6, 0.75]]`;
`probs=[[0.8]], ratios=[[1.6]], advantages=[0]` gives `metrics={"dppo/masked_mean": 0}`.

When: samples of an engine that differs, or stale ones; rare tokens keep a gradient.

Source: arXiv:2602.04879, eq. 13; the threshold as in SkyRL and prime-rl, where verl's example has 0.15; the ceiling as
in verl's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from groupgrad.objectives.measure import mean_where
from groupgrad.objectives.method import Method, PolicyTerms, TokenLoss, sampler_logprobs
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.registry import MORE_THAN_0, setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of DPPO."""

    threshold: float = setting(0.2, MORE_THAN_0, "leaves no token")
    """Divergence of a token's probability from the sampler's from which on it is left out."""
    ceiling: float = setting(20.0, MORE_THAN_0, "leaves no token")
    """Largest weight of a token."""


Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Probabilities (L,) of the policy and of the sampler -> their divergence (L,), at least 0."""


def total_variation(policy: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    """|pi - mu|, the total variation between two outcomes: this token, or another."""
    return (policy - sampler).abs()


def masked(divergence: Divergence) -> Callable[[PolicyTerms, PolicyOptions], TokenLoss]:
    """The surrogate that leaves tokens out by this divergence."""

    def surrogate(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
        log_mu = sampler_logprobs(terms)
        policy, sampler = terms.logprobs.detach().exp(), log_mu.exp()
        away = (policy - sampler) * terms.token_advantages > 0
        outside = away & (divergence(policy, sampler) > options.settings.threshold)
        weight = (terms.logprobs.detach() - log_mu).exp().clamp(max=options.settings.ceiling)
        loss = -weight * terms.token_advantages * terms.logprobs
        metrics = {"dppo/masked_mean": mean_where(outside.float(), terms.batch.trained)}
        return TokenLoss(torch.where(outside, torch.zeros_like(loss), loss), metrics)

    return surrogate


METHOD = Method(
    masked(total_variation),
    "token_mean",
    level="token",
    settings=Settings,
    folds_mismatch=True,
    metrics=("dppo/masked_mean",),
)
