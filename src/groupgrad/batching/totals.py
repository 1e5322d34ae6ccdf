"""The denominators of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from groupgrad import dist
from groupgrad.batch import Batch, StepTotals
from groupgrad.objectives import entropy_threshold

# Tokens of one context have one entropy, but for rounding: the first tokens of a group do. Those at the threshold are
# all kept, whichever way they were rounded in the micro-batch that they came with.
_TIE_NATS = 1e-5


def step_totals(
    batches: Sequence[Batch], *, keep_entropy: float = 1.0, entropy_of: Callable[[Batch], torch.Tensor] | None = None
) -> StepTotals:
    """Collective. Totals over all ranks and micro-batches of the step that `batches` are this rank's part of.

    With `keep_entropy` < 1 the entropy from which the step's most uncertain tokens are kept is found over the whole
    step (arXiv:2506.01939, eq. 6), which takes `entropy_of` each batch, empty ones too; otherwise all tokens are kept.
    """
    mine = [float(sum(batch.num_rows for batch in batches)), float(sum(int(b.trained.sum()) for b in batches))]
    rows, tokens = dist.all_sum(mine)
    threshold = kept = None
    if keep_entropy < 1.0 and entropy_of is not None:
        with dist.together():
            mine_entropy = [entropy_of(batch)[batch.trained] for batch in batches]
        entropies = dist.all_gather_rows(torch.cat([torch.zeros(0), *mine_entropy]))
        if len(entropies):
            threshold = entropy_threshold(entropies, keep_entropy)
            threshold -= _TIE_NATS * max(1.0, abs(threshold))
            kept = float((entropies >= threshold).sum())
    return StepTotals(
        rows=rows,
        tokens=tokens,
        micro_batches=len(batches),
        world_size=dist.world_size(),
        entropy_threshold=threshold,
        entropy_tokens=kept,
    )
