"""Ragged batches, scores and losses of nested lists, one list a completion."""

from __future__ import annotations

import torch

from groupgrad.batch import Batch, StepTotals, TokenScores
from groupgrad.objectives import policy_loss

F64 = torch.float64


def flat(rows, dtype=F64):
    """(L,) the rows end to end, or None."""
    return None if rows is None else torch.tensor([value for row in rows for value in row], dtype=dtype)


def make_batch(trained, advantages, totals=None, *, old=None, ref=None, sampling=None):
    """A batch of completions of one prompt; `totals` defaults to those of a step that this batch is all of."""
    lengths = [len(row) for row in trained]
    mask = flat(trained, torch.bool)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Batch(
        completion_ids=torch.zeros(sum(lengths), dtype=torch.int64),
        row_of_token=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        offsets=offsets,
        prompt_ids=torch.zeros(1, dtype=torch.int64),
        prompt_offsets=torch.tensor([0, 1]),
        prompt_of_row=torch.zeros(len(lengths), dtype=torch.int64),
        trained=mask,
        advantages=torch.as_tensor(advantages, dtype=F64),
        totals=totals or StepTotals(rows=len(lengths), tokens=int(mask.sum())),
        old_logprobs=flat(old),
        ref_logprobs=flat(ref),
        sampling_logprobs=flat(sampling),
    )


def make_scores(logprobs, entropy=None, *, grad=False):
    """Scores of nested lists; entropy 0 if not given."""
    entropy = [[0.0] * len(row) for row in logprobs] if entropy is None else entropy
    return TokenScores(flat(logprobs).requires_grad_(grad), flat(entropy).requires_grad_(grad))


def loss_and_gradient(logprobs, batch, options):
    """The loss, and its gradient token by token."""
    scores = make_scores(logprobs, grad=True)
    result = policy_loss(scores, batch, options)
    result.loss.backward()
    return result, scores.logprobs.grad.tolist()
