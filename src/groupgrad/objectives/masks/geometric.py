r"""Geometric mask: completions whose mean log-ratio to the sampler is outside a narrow band are left out.

$$low \le \exp\left(\frac{1}{T_i} \sum_t \log r_{i,t}\right) \le high$$

The product of ratios leaves every band as completions grow; their geometric mean does not.

Worked: `ratios=[[1.03, 1.01]]` gives `[[0, 0]]`;
`ratios=[[1.03, 1.01]], high=1.02` gives `[[1, 1]]`.

When: long completions from an engine with other numbers, or stale ones.

Source: sequence masks by the geometric mean in SkyRL and verl; the mean ratio: arXiv:2507.18071, eq. 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.mask import Mask
from groupgrad.objectives.masks import k1
from groupgrad.objectives.ragged import PerRow, PerToken
from groupgrad.objectives.registry import setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of the geometric mask."""

    low: float = setting(0.99, k1.LOW, "leaves out an unmoved policy")
    """Smallest geometric mean that is kept."""
    high: float = setting(1.01, k1.HIGH, "leaves out an unmoved policy")
    """Largest geometric mean that is kept."""


def within(log_ratio: torch.Tensor, batch: Batch, settings: Settings) -> PerToken | PerRow:
    """True for rows whose geometric mean is in the band."""
    return k1.within(log_ratio, batch, k1.Settings("sequence_mean", settings.low, settings.high))


MASK = Mask(within, Settings)
