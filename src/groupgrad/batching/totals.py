"""Denominators of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from groupgrad import dist
from groupgrad.batch import Batch, StepTotals
from groupgrad.objectives import entropy_threshold

# Tokens with the same context have the same entropy but for rounding, as the first tokens of a group do. All tokens at
# the threshold are kept, however the micro-batch that computed them rounded.
_TIE_NATS = 1e-5


def step_totals(
    batch: Batch,
    num_micro_batches: int,
    *,
    keep_entropy: float = 1.0,
    entropy_of: Callable[[Batch], torch.Tensor] | None = None,
) -> StepTotals:
    """Collective. Totals over all ranks of the step that `batch` is this rank's part of.

    With `keep_entropy` < 1 the entropy threshold that keeps the step's most uncertain tokens is computed over the whole
    step (arXiv:2506.01939, eq. 6) from `entropy_of(batch)`, (L,) nats, which is called on ranks without rows too.
    """
    rows, tokens = dist.all_sum([float(batch.num_rows), float(batch.trained.sum())])
    totals = StepTotals(rows, tokens, micro_batches=num_micro_batches, world_size=dist.world_size())
    if keep_entropy < 1.0 and entropy_of is not None:
        return _with_entropy_threshold(totals, batch, keep_entropy, entropy_of)
    return totals


def _with_entropy_threshold(
    totals: StepTotals, batch: Batch, keep_entropy: float, entropy_of: Callable[[Batch], torch.Tensor]
) -> StepTotals:
    """Collective. Adds the threshold and the number of tokens that it keeps; neither if the step has no tokens."""
    with dist.errors_on_all_ranks():
        entropy = entropy_of(batch)[batch.trained]
    entropies = dist.all_gather_rows(entropy)
    if not len(entropies):
        return totals
    threshold = entropy_threshold(entropies, keep_entropy)
    threshold -= _TIE_NATS * max(1.0, abs(threshold))
    return replace(totals, entropy_threshold=threshold, entropy_tokens=float((entropies >= threshold).sum()))
