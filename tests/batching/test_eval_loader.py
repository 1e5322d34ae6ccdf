"""Evaluation batches."""

from __future__ import annotations

import pytest

from groupgrad.batching.eval_loader import EvalBatch, EvalLoader


def test_every_prompt_once_in_order_with_the_rest_last():
    loader = EvalLoader([{"prompt": str(i)} for i in range(7)], 3)
    batches = list(loader)
    assert len(loader) == 3 and loader.num_workers == 0
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert [[row["prompt"] for row in batch.rows] for batch in batches] == [["0", "1", "2"], ["3", "4", "5"], ["6"]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("prompts_per_batch", [1, 3, 5, 8])
@pytest.mark.parametrize("num_prompts", [1, 3, 5])
def test_ranks_share_out_the_completions_without_doubles_or_gaps(
    world_size: int, prompts_per_batch: int, num_prompts: int
):
    batch = EvalBatch(0, [{"prompt": "x"}] * num_prompts, prompts_per_batch)
    parts = [list(batch.rank_rows(rank, world_size, 2)) for rank in range(world_size)]
    assert [row for part in parts for row in part] == list(range(2 * num_prompts))
    has_room_for_groups = prompts_per_batch >= world_size
    if has_room_for_groups:
        assert all(part[0] % 2 == 0 and len(part) % 2 == 0 for part in parts if part)
    assert max(map(len, parts)) - min(map(len, parts)) <= (2 if has_room_for_groups else 1)
