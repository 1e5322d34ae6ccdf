"""Sums rows and tokens over all ranks: the denominators of an optimizer step's loss."""

from __future__ import annotations

from dataclasses import replace

import torch

from groupgrad import dist
from groupgrad.batch import Batch, StepTotals
from groupgrad.objectives import Mask, Method, PolicyOptions, StepTokens, drift, entropy_threshold
from groupgrad.objectives.ragged import token_advantages
from groupgrad.objectives.terms import ROUNDING_NATS


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
    # Tokens with the same context have the same entropy but for rounding, as the first tokens of a group do. All tokens
    # at the threshold are kept, however the micro-batch that computed them rounded.
    threshold -= ROUNDING_NATS * max(1.0, abs(threshold))
    return replace(totals, entropy_threshold=threshold, entropy_tokens=float((entropies >= threshold).sum()))


def with_drift_cutoff(
    totals: StepTotals, batch: Batch, logprobs: torch.Tensor, mask: Mask, options: PolicyOptions
) -> StepTotals:
    """Collective. The totals of a step whose off-policy mask keeps tokens up to a cutoff over all of its tokens.

    `logprobs` (L,) are those of the present policy for each rank's part.
    """
    behaviour = batch.old_logprobs if batch.sampling_logprobs is None else batch.sampling_logprobs
    if mask.cutoff is None or behaviour is None:
        return totals
    gaps = dist.all_gather_rows(drift(logprobs, behaviour, batch)[batch.trained])
    cutoff = mask.cutoff(gaps, options.mask_settings)
    if cutoff >= 0:  # a pass of training may round a token's log-prob otherwise
        cutoff = (cutoff**0.5 + ROUNDING_NATS) ** 2
    return replace(totals, drift_cutoff=cutoff)


def with_selected(batch: Batch, logprobs: torch.Tensor, method: Method, options: PolicyOptions, seed: int) -> Batch:
    """Collective. This rank's part of a step with the tokens that the loss selects among all of the step's.

    `logprobs` (L,) are those of the present policy; equal seeds select alike, on any number of ranks.
    """
    assert method.select is not None
    here = torch.stack([logprobs.double(), token_advantages(batch).double()], dim=1)[batch.trained].cpu()
    parts = dist.all_gather_objects(here)
    tokens, first = torch.cat(parts), sum(len(part) for part in parts[: dist.rank()])
    generator = torch.Generator().manual_seed(seed)
    chosen = method.select(StepTokens(tokens[:, 0], tokens[:, 1]), options, generator)[first : first + len(here)]
    selected = torch.zeros_like(batch.trained)
    selected[batch.trained] = chosen.to(selected.device)
    return replace(batch, selected=selected)
