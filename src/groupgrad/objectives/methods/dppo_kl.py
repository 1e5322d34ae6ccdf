r"""DPPO, binary KL: as `dppo_tv`, with the Kullback-Leibler divergence between this token and any other.

$$\mu \log\frac{\mu}{\pi} + (1 - \mu) \log\frac{1 - \mu}{1 - \pi}$$

Worked: `probs=[[0.7, 0.6]], ratios=[[1.4, 1.2]], advantages=[1]` gives `gradient=[[0, -0.6]]`: they are 0.087 and 0.02;
`probs=[[0.8]], ratios=[[1.6]], advantages=[1], threshold=0.223` gives `gradient=[[0]],
metrics={"dppo/masked_mean": 1}`;
`probs=[[0.8]], ratios=[[1.6]], advantages=[1], threshold=0.224` gives `gradient=[[-1.6]], metrics={"dppo/masked_mean":
0}`; `probs=[[0.5]], ratios=[[0.5]], advantages=[-1]` gives `gradient=[[0]]`.

When: as `dppo_tv`, with a bound in nats.

Source: arXiv:2602.04879, eq. 14; the threshold as in SkyRL and in verl's example.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.objectives.method import Method
from groupgrad.objectives.methods.dppo_tv import masked
from groupgrad.objectives.registry import MORE_THAN_0, setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of DPPO with the KL divergence."""

    threshold: float = setting(0.05, MORE_THAN_0, "leaves no token")
    """Divergence of a token's probability from the sampler's from which on it is left out, nats."""
    ceiling: float = setting(20.0, MORE_THAN_0, "leaves no token")
    """Largest weight of a token."""


def binary_kl(policy: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    """KL(mu || pi) of two outcomes, nats; probabilities of 0 and 1 count as the nearest numbers that are not."""
    least = torch.finfo(policy.dtype).eps
    policy, sampler = (values.clamp(least, 1 - least) for values in (policy, sampler))
    return sampler * (sampler / policy).log() + (1 - sampler) * ((1 - sampler) / (1 - policy)).log()


METHOD = Method(
    masked(binary_kl),
    "token_mean",
    level="token",
    settings=Settings,
    folds_mismatch=True,
    metrics=("dppo/masked_mean",),
)
