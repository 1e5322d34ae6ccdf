"""The scores of a micro-batch, of which the model computes only what is not known."""

from __future__ import annotations

from collections.abc import Callable

import torch

from groupgrad.batch import FORWARD, FORWARD_AND_BACKWARD, Batch, TokenScores


def needed_scores(
    batch: Batch, policy: Callable[[Batch], TokenScores], measure: Callable[[Batch], TokenScores]
) -> TokenScores:
    """Scores of all completion tokens: by `policy`, with gradient, for live rows; by `measure`, without, for those that
    need a forward pass alone; the sampler's, 0 where it gave none, for the others.

    A function is called only if there are rows for it. Without `batch.passes` all rows are live.
    """
    if batch.passes is None or bool((batch.passes == FORWARD_AND_BACKWARD).all()):
        return policy(batch)
    logprobs = _reported(batch.sampling_logprobs, batch)
    entropy = _reported(batch.sampling_entropy, batch)
    for needed, forward in ((FORWARD, measure), (FORWARD_AND_BACKWARD, policy)):
        rows = batch.passes == needed
        if bool(rows.any()):
            with torch.set_grad_enabled(needed == FORWARD_AND_BACKWARD and torch.is_grad_enabled()):
                scores = forward(batch.select(rows.nonzero().flatten()))
            tokens = rows[batch.row_of_token]
            logprobs = logprobs.masked_scatter(tokens, scores.logprobs)
            entropy = entropy.masked_scatter(tokens, scores.entropy)
    return TokenScores(logprobs, entropy)


def _reported(values: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    if values is None:
        return torch.zeros(batch.num_tokens, device=batch.completion_ids.device)
    return torch.where(values.isfinite(), values, torch.zeros_like(values))
