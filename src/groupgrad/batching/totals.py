"""Sums rows and tokens over all ranks: the denominators of an optimizer step's loss."""

from __future__ import annotations

from dataclasses import replace

import torch

from groupgrad import dist
from groupgrad.batch import Batch, StepTotals
from groupgrad.objectives import entropy_threshold

# Tokens with the same context have the same entropy but for rounding, as the first tokens of a group do. All tokens at
# the threshold are kept, however the micro-batch that computed them rounded.
_TIE_NATS = 1e-5


def step_totals(batch: Batch, num_micro_batches: int) -> StepTotals:
    """Collective. Totals over all ranks of the step that `batch` is this rank's part of."""
    rows, tokens = dist.all_sum([float(batch.num_rows), float(batch.trained.sum())])
    return StepTotals(rows, tokens, micro_batches=num_micro_batches, world_size=dist.world_size())


def with_entropy_threshold(totals: StepTotals, batch: Batch, entropy: torch.Tensor, keep: float) -> StepTotals:
    """Collective. The totals of a step whose most uncertain tokens alone are trained, a share `keep` of them.

    The threshold is that of the whole step (arXiv:2506.01939, eq. 6), over the (L,) `entropy` (nats) of each rank's
    part. A step without loss tokens has none.
    """
    entropies = dist.all_gather_rows(entropy[batch.trained])
    if not len(entropies):
        return totals
    threshold = entropy_threshold(entropies, keep)
    threshold -= _TIE_NATS * max(1.0, abs(threshold))
    return replace(totals, entropy_threshold=threshold, entropy_tokens=float((entropies >= threshold).sum()))
