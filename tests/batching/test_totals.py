"""The denominators of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupgrad.batch import StepTotals
from groupgrad.batching.collate import collate
from groupgrad.batching.totals import step_totals


def test_rows_and_loss_tokens_of_all_micro_batches(make_rollout):
    batches = [
        collate([make_rollout(3), make_rollout(4, "length")], [0.0] * 2, mask_truncated=True),
        collate(
            [make_rollout(5, sampled=[True, False, True, True, False]), make_rollout(0)], [0.0] * 2, mask_truncated=True
        ),
    ]
    assert step_totals(batches) == StepTotals(rows=4.0, tokens=6.0, micro_batches=2, world_size=1)
    assert step_totals([]) == StepTotals(rows=0.0, tokens=0.0, micro_batches=0)


def test_the_entropy_threshold_is_that_of_the_whole_step(make_rollout):
    """Entropies of the loss tokens 0..5 over two batches; the upper half are 3, 4, 5, from the quantile 2.5
    on, less the breadth of a tie."""
    batches = [
        collate([make_rollout(3), make_rollout(2, "length")], [0.0] * 2, mask_truncated=True),
        collate([make_rollout(3)], [0.0], mask_truncated=True),
    ]
    entropies = {
        id(batches[0]): torch.tensor([5.0, 0.0, 3.0, 90.0, 91.0]),
        id(batches[1]): torch.tensor([1.0, 4.0, 2.0]),
    }

    def entropy_of(batch: Any) -> torch.Tensor:
        return entropies[id(batch)]

    totals = step_totals(batches, keep_entropy=0.5, entropy_of=entropy_of)
    assert totals.entropy_threshold == pytest.approx(2.5 - 2.5e-5)
    assert totals.entropy_tokens == 3.0
    assert step_totals(batches, keep_entropy=1.0, entropy_of=entropy_of).entropy_threshold is None


def test_a_step_without_a_loss_token_has_no_threshold(make_rollout):
    batch = collate([make_rollout(2, "length")], [0.0], mask_truncated=True)
    totals = step_totals([batch], keep_entropy=0.5, entropy_of=lambda b: torch.ones(b.num_tokens))
    assert (totals.tokens, totals.entropy_threshold, totals.entropy_tokens) == (0.0, None, None)


def test_tokens_tied_at_the_threshold_are_kept_together(make_rollout):
    batch = collate([make_rollout(4)], [0.0], mask_truncated=True)
    entropies = torch.tensor([3.0, 3.0 - 1e-6, 3.0, 1.0])
    totals = step_totals([batch], keep_entropy=0.0, entropy_of=lambda b: entropies)
    assert totals.entropy_tokens == 3.0
