r"""M2PO: the tokens that drifted furthest are left out until the second moment of the others is at most a bound.

Over all loss tokens of the optimizer step, the largest squared log-ratios are left out until

$$\frac{1}{N} \sum (\log r)^2 \le \tau$$

holds for the N that stay. In later steps of a generation batch it takes a forward pass of the step's rows.

It stands in place of a clip: `cispo` with a high `epsilon_high` bounds no ratio beside it. The mask is as the paper
defines it, and as in AReaL. The authors' code counts only tokens that moved as their advantage pulls, and clips them.

Worked: `ratios=[[1.1, 1.2, 1.3, 2]]` gives `[[1, 1, 1, 0]]`: the squares are 0.009, 0.033, 0.069 and 0.48, and the
first three have a mean of 0.037.

When: very stale samples; few tokens carry most of the variance.

Source: arXiv:2510.01161, with its tau.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.mask import Mask
from groupgrad.objectives.ragged import PerToken
from groupgrad.objectives.registry import NOT_NEGATIVE, setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of M2PO."""

    tau: float = setting(0.04, NOT_NEGATIVE, "keeps no token")
    """Largest second moment of the log-ratios, nats squared."""


def largest_kept(log_ratios: torch.Tensor, settings: Settings) -> float:
    """The largest squared log-ratio that stays; -1 if none does. Equal squares stay or go together."""
    squares = log_ratios.double().square().sort().values
    count = torch.arange(1, len(squares) + 1, dtype=torch.float64, device=squares.device)
    fits = squares.cumsum(0) / count <= settings.tau * (1 + 1e-12)
    if bool(fits.all()):
        return math.inf
    kept = int(fits.sum())  # the running mean of ascending numbers never falls
    lower = squares[squares < squares[kept]]
    return float(lower[-1]) if len(lower) else -1.0


def small(log_ratio: torch.Tensor, batch: Batch, settings: Settings) -> PerToken:
    """True for tokens up to the step's cutoff."""
    cutoff = batch.totals.drift_cutoff
    squares = log_ratio.double().square()
    return PerToken(torch.ones_like(squares, dtype=torch.bool) if cutoff is None else squares <= cutoff)


MASK = Mask(small, Settings, cutoff=largest_kept)
