"""The denominators of a step."""

from __future__ import annotations

import pytest
import torch

from groupgrad.batch import StepTotals
from groupgrad.batching.collate import collate
from groupgrad.batching.totals import step_totals, with_entropy_threshold


def test_rows_and_loss_tokens_of_all_micro_batches(make_rollout):
    rollouts = [
        *(make_rollout(3), make_rollout(4, "length")),
        *(make_rollout(5, sampled=[True, False, True, True, False]), make_rollout(0)),
    ]
    batch = collate(rollouts, [0.0] * 4, mask_truncated=True)
    assert step_totals(batch, 2) == StepTotals(rows=4.0, tokens=6.0, micro_batches=2, world_size=1)
    assert step_totals(batch.select([]), 1) == StepTotals(rows=0.0, tokens=0.0, micro_batches=1)


def test_the_entropy_threshold_is_that_of_the_whole_step(make_rollout):
    """Entropies of the loss tokens are 0..5; the upper half are 3, 4, 5, from the quantile 2.5 on, less a tie."""
    rollouts = [make_rollout(3), make_rollout(2, "length"), make_rollout(3)]
    batch = collate(rollouts, [0.0] * 3, mask_truncated=True)

    entropy = torch.tensor([5.0, 0.0, 3.0, 90.0, 91.0, 1.0, 4.0, 2.0])
    totals = with_entropy_threshold(step_totals(batch, 2), batch, entropy, 0.5)
    assert totals.entropy_threshold == pytest.approx(2.5 - 2.5e-5)
    assert totals.entropy_tokens == 3.0
    assert step_totals(batch, 2).entropy_threshold is None


def test_a_step_without_a_loss_token_has_no_threshold(make_rollout):
    batch = collate([make_rollout(2, "length")], [0.0], mask_truncated=True)
    totals = with_entropy_threshold(step_totals(batch, 1), batch, torch.ones(batch.num_tokens), 0.5)
    assert (totals.tokens, totals.entropy_threshold, totals.entropy_tokens) == (0.0, None, None)


def test_tokens_tied_at_the_threshold_are_kept_together(make_rollout):
    batch = collate([make_rollout(4)], [0.0], mask_truncated=True)
    entropies = torch.tensor([3.0, 3.0 - 1e-6, 3.0, 1.0])
    totals = with_entropy_threshold(step_totals(batch, 1), batch, entropies, 0.0)
    assert totals.entropy_tokens == 3.0
