r"""k3: tokens or completions whose k3 estimate of the divergence from the sampler is above a threshold are left out.

$$r_{i,t} - 1 - \log r_{i,t}$$

of the token (`level` = token), or its mean, sum or largest over the completion (sequence_mean, sequence_sum,
sequence_max). It is never negative.

Worked: `ratios=[[2, 0.5]], level="token", threshold=0.306` gives `[[0, 1]]`;
`ratios=[[2, 0.5]], level="token", threshold=0.307` gives `[[1, 1]]`.

When: as `k2`; ratios above 1 count more than those below.

Source: joschu.net/blog/kl-approx.html; as a mask in verl (rollout_rs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.mask import LEVELS, Mask, at_level
from groupgrad.objectives.ragged import PerRow, PerToken
from groupgrad.objectives.registry import NOT_NEGATIVE, one_of_names, setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of masks by a divergence."""

    level: str = setting("sequence_mean", one_of_names(*LEVELS), "is not known")
    """The threshold bounds each token's divergence, or the mean, sum or largest one of a completion."""
    threshold: float = setting(0.01, NOT_NEGATIVE, "leaves out an unmoved policy")
    """Largest divergence that is kept, nats."""


def below(log_ratio: torch.Tensor, batch: Batch, settings: Settings) -> PerToken | PerRow:
    """True where the divergence is at most the threshold."""
    found = at_level(torch.expm1(log_ratio) - log_ratio, batch, settings.level)
    return type(found)(found.values <= settings.threshold)


MASK = Mask(below, Settings)
