r"""k1: ratios outside a band are left out.

A token is kept if its ratio is in the band, or a completion if the product or the geometric mean of its ratios is:

$$low \le \exp(\log r) \le high$$

with log r of the token (`level` = token), or its sum (sequence_sum) or mean (sequence_mean) over the completion.

Worked: `ratios=[[2.5, 1.9, 0.4]]` gives `[[0, 1, 0]]`;
`ratios=[[2.5, 0.4]], level="sequence_sum"` gives `[[1, 1]]`.

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
from groupgrad.objectives.ragged import PerRow, PerToken
from groupgrad.objectives.registry import Range, one_of_names, setting

LOW = Range("more than 0, at most 1", lambda value: 0 < value <= 1)
HIGH = Range("1 or more", lambda value: value >= 1)


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of k1."""

    level: str = setting("token", one_of_names("token", "sequence_mean", "sequence_sum"), "is not known")
    """The band bounds each token's log-ratio, or the mean or the sum of those of a completion."""
    low: float = setting(0.5, LOW, "leaves out an unmoved policy")
    """Smallest ratio that is kept."""
    high: float = setting(2.0, HIGH, "leaves out an unmoved policy")
    """Largest ratio that is kept."""


def within(log_ratio: torch.Tensor, batch: Batch, settings: Settings) -> PerToken | PerRow:
    """True where the ratio is in the band."""
    found = at_level(log_ratio, batch, settings.level)
    return type(found)((found.values >= log(settings.low)) & (found.values <= log(settings.high)))


MASK = Mask(within, Settings)
