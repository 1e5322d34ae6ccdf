r"""k1: ratios outside a band are left out.

A token is kept if its ratio is in the band, or a completion if the product or the geometric mean of its ratios is:

$$low \le \exp(\log r) \le high$$

with log r of the token (`level` = token), or its sum (sequence_sum) or mean (sequence_mean) over the completion. A
ratio of 2.5 under a band from 0.5 to 2 is left out.

When: single tokens, or completions, that the sampler gave quite another probability.

Source: the k1 estimator of the KL divergence (joschu.net/blog/kl-approx.html); as a mask in verl (rollout_rs), and per
token in IcePop.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.mask import Mask, at_level
from groupgrad.objectives.options import one_of
from groupgrad.objectives.ragged import PerRow, PerToken


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of k1."""

    level: str = "token"
    """token, sequence_mean or sequence_sum."""
    low: float = 0.5
    """Smallest ratio that is kept."""
    high: float = 2.0
    """Largest ratio that is kept."""

    def __post_init__(self) -> None:
        one_of("off_policy_mask_settings has level", self.level, ("token", "sequence_mean", "sequence_sum"))
        if not 0 < self.low <= 1 <= self.high:
            raise ValueError(
                f"off_policy_mask_settings has low={self.low} and high={self.high}, which leave out an unmoved policy. "
                "Set low to at most 1, above 0, and high to 1 or more"
            )


def within(log_ratio: torch.Tensor, batch: Batch, settings: Settings) -> PerToken | PerRow:
    """True where the ratio is in the band."""
    found = at_level(log_ratio, batch, settings.level)
    return type(found)((found.values >= log(settings.low)) & (found.values <= log(settings.high)))


MASK = Mask(within, Settings)
