"""What the micro-batches of an optimizer step are made of: which rows, and how much of the model each row needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from groupgrad.batch import FORWARD, FORWARD_AND_BACKWARD, Batch
from groupgrad.batching.packing import pack, row_costs
from groupgrad.objectives import LOSSES, OnPolicyInfo, PolicyOptions, required_passes


def assign_micro_batches(
    batches: Sequence[Batch],
    options: PolicyOptions,
    freshness: OnPolicyInfo,
    *,
    entropy_coef: float,
    aux_loss: bool,
    backward_everywhere: bool = False,
    one_pass: bool = False,
) -> list[Batch]:
    """The step's rows on this rank in as many micro-batches as before, of like cost, each row with the passes it needs.

    Loss, gradient and metrics are those of `batches`. With `backward_everywhere` each micro-batch has at least one row
    with a gradient; otherwise at least one has, so that the optimizer decays its momenta and weights also in a step
    without any signal. A loss that is defined by the micro-batches that its rows come in (`bnpo`, load balancing) keeps
    the rows where they are.

    With `one_pass` a micro-batch is at most one pass through the model: rows that need a forward pass get a backward
    pass too. Ranks that hold parts of one model make equally many passes so.
    """
    is_local = aux_loss or LOSSES[options.loss_type].reduction == "local_token_mean"
    noted = [
        replace(
            batch,
            passes=required_passes(batch, options, freshness, entropy_coef=entropy_coef, aux_loss=aux_loss),
        )
        for batch in batches
    ]
    if one_pass:
        noted = [replace(batch, passes=_all_or_nothing(batch.passes)) for batch in noted]
    if len(noted) > 1 and not is_local:
        whole = Batch.concat(noted)
        bounds = accumulate((batch.num_rows for batch in noted), initial=0)
        plan = [range(start, end) for start, end in pairwise(bounds)]
        noted = [whole.select(rows) for rows in pack(row_costs(whole), plan)]
    if backward_everywhere:
        return [_with_a_live_row(batch) for batch in noted]
    if not any(has_gradient(batch) for batch in noted):
        first = next((i for i, batch in enumerate(noted) if batch.num_rows), None)
        if first is not None:
            noted[first] = _with_a_live_row(noted[first])
    return noted


def _all_or_nothing(passes: torch.Tensor | None) -> torch.Tensor | None:
    return None if passes is None else passes.masked_fill(passes == FORWARD, FORWARD_AND_BACKWARD)


def has_gradient(batch: Batch) -> bool:
    """True if any row needs a backward pass."""
    return batch.passes is None or bool((batch.passes == FORWARD_AND_BACKWARD).any())


def _with_a_live_row(batch: Batch) -> Batch:
    """The batch, its shortest row (one with tokens if there is one) made live if none is."""
    if has_gradient(batch) or not batch.num_rows or batch.passes is None:
        return batch
    lengths = batch.offsets.diff()
    cost = lengths + batch.prompt_offsets.diff()[batch.prompt_of_row]
    row = int(torch.where(lengths > 0, cost, cost + int(cost.max()) + 1).argmin())
    passes = batch.passes.clone()
    passes[row] = FORWARD_AND_BACKWARD
    return replace(batch, passes=passes)
