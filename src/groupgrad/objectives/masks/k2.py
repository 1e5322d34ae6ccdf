r"""k2: tokens or completions whose k2 estimate of the divergence from the sampler is above a threshold are left out.

$$\frac{1}{2} (\log r_{i,t})^2$$

of the token (`level` = token), or its mean, sum or largest over the completion (sequence_mean, sequence_sum,
sequence_max).

Worked: `ratios=[[2, 0.5]], level="token", threshold=0.24` gives `[[0, 0]]`;
`ratios=[[2, 0.5]], level="token", threshold=0.241` gives `[[1, 1]]`.

When: stale samples, or an engine with other numbers; drift in both directions counts alike, and does not cancel.

Source: joschu.net/blog/kl-approx.html; as a mask in verl (rollout_rs).
"""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.mask import Mask, at_level
from groupgrad.objectives.masks.k3 import Settings
from groupgrad.objectives.ragged import PerRow, PerToken


def below(log_ratio: torch.Tensor, batch: Batch, settings: Settings) -> PerToken | PerRow:
    """True where the divergence is at most the threshold."""
    found = at_level(log_ratio.square() / 2, batch, settings.level)
    return type(found)(found.values <= settings.threshold)


MASK = Mask(below, Settings)
