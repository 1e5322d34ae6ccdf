"""Rows of a step are moved between ranks until all have about the same cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupgrad import dist
from groupgrad.batching.collate import collate
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.batching.packing import RowCost, total_cost
from groupgrad.batching.rank_balance import assign_to_ranks, rows_to_trainers
from groupgrad.types import Prompt, Rollout


def bin_costs(costs, ranks, num_ranks):
    return [total_cost(cost for cost, rank in zip(costs, ranks) if rank == place) for place in range(num_ranks)]


def test_the_row_that_evens_the_loads_is_moved():
    """Rank 0 has 60 + 30 + 10 and rank 1 has 20: with the row of 30, or of 30 and 10, they are 70 and 50 or 60 each."""
    costs = [RowCost(60, 0, 0), RowCost(30, 0, 1), RowCost(10, 0, 2), RowCost(20, 0, 3)]
    assert assign_to_ranks(costs, [0, 0, 0, 1], 2) == [0, 1, 1, 1]


def test_a_group_that_was_cut_is_joined_where_the_prompt_costs_more():
    """A prompt of 100 on both ranks, each with a row of 10 of both groups: 220 each. With whole groups 120 each."""
    costs = [RowCost(10, 100, group) for group in (0, 1, 0, 1)]
    chosen = assign_to_ranks(costs, [0, 0, 1, 1], 2)
    assert chosen[0] == chosen[2] != chosen[1] == chosen[3]


def test_nothing_moves_for_a_small_gain():
    costs = [RowCost(100, 0, 0), RowCost(1, 0, 1), RowCost(99, 0, 2)]
    assert assign_to_ranks(costs, [0, 0, 1], 2) == [0, 0, 1]


def test_each_rank_keeps_as_many_rows_as_it_has_micro_batches():
    costs = [RowCost(100, 0, 0), RowCost(90, 0, 1), RowCost(1, 0, 2), RowCost(1, 0, 3)]
    chosen = assign_to_ranks(costs, [0, 0, 1, 1], 2, least_rows=2)
    assert sorted(chosen) == [0, 0, 1, 1] and chosen[0] != chosen[1]


def test_rows_of_another_rank_are_put_in_their_order(monkeypatch):
    """Rank 1 has sampled rows 2 and 3 and trains 1 and 3, the first of which rank 0 sends."""
    plan = GenerationPlan(
        micro_batch_rows=1, world_size=2, accumulation=1, steps_per_generation=2, num_iterations=1, num_generations=2
    )

    def batch(*rows):
        rollouts = [Rollout(Prompt([5], {}, row // 2), row, [row], "eos", "", "") for row in rows]
        return collate(rollouts, [0.0] * len(rows), mask_truncated=False)

    monkeypatch.setattr(dist, "rank", lambda: 1)
    monkeypatch.setattr(dist, "exchange_objects", lambda outgoing, routes: {0: batch(1)})
    moved = rows_to_trainers(batch(2, 3), plan, 0)
    assert moved.row_index.tolist() == moved.completion_ids.tolist() == [1, 3]


def test_rows_that_need_no_pass_stay():
    costs = [RowCost(0, 0, 0), RowCost(0, 0, 0), RowCost(0, 0, 1), RowCost(0, 0, 1)]
    assert assign_to_ranks(costs, [0, 0, 1, 1], 2) == [0, 0, 1, 1]
    assert assign_to_ranks([], [], 3) == []


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_largest_load_never_grows_and_no_rank_is_left_without_rows(data):
    num_ranks = data.draw(st.integers(1, 5))
    rows = st.tuples(st.integers(0, 50), st.integers(0, 3), st.integers(0, num_ranks - 1))
    drawn = data.draw(st.lists(rows, max_size=24))
    prompts = data.draw(st.lists(st.integers(0, 80), min_size=4, max_size=4))
    drawn += [(1, 0, rank) for rank in range(num_ranks)]
    costs = [RowCost(own, prompts[group], group) for own, group, _ in drawn]
    holders = [rank for _, _, rank in drawn]
    chosen = assign_to_ranks(costs, holders, num_ranks)
    assert set(chosen) == set(range(num_ranks))
    assert max(bin_costs(costs, chosen, num_ranks)) <= max(bin_costs(costs, holders, num_ranks))


@pytest.mark.parametrize(
    ("num_ranks", "mean", "longest", "prompt", "size", "rows", "has_flat_groups"),
    [
        *((ranks, 400, 2048, 128, 8, 32, False) for ranks in (2, 4, 8)),
        *((n, 96, 512, 256, 16, 64, True) for n in (2, 4, 8)),
    ],
)
def test_unlike_lengths_are_within_5_percent_of_the_mean(num_ranks, mean, longest, prompt, size, rows, has_flat_groups):
    """Lengths as reasoning tasks have them: geometric, cut at the longest, `rows` a rank in groups of `size`."""
    import numpy as np

    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = np.minimum(rng.geometric(1 / mean, size=rows * num_ranks), longest)
        costs = []
        for row, length in enumerate(lengths):
            backward = 0 if has_flat_groups and row // size % 2 else 3
            costs.append(RowCost(backward * int(length), backward * prompt, row // size))
        holders = [row // rows for row in range(len(costs))]
        found = bin_costs(costs, assign_to_ranks(costs, holders, num_ranks), num_ranks)
        assert max(found) <= 1.05 * sum(found) / num_ranks
