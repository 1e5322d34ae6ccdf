"""Rows shared out by cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupgrad.data.collate import collate
from groupgrad.step.packing import RowCost, halves, load, pack, row_costs
from groupgrad.types import Prompt, Rollout


def rows(*groups: list[int], prompt: int = 0) -> list[RowCost]:
    """Completion lengths, one list a group."""
    return [RowCost(length, prompt, g) for g, lengths in enumerate(groups) for length in lengths]


def in_order(count: int, bins: int) -> list[list[int]]:
    """Contiguous shares of like size, as the round's plan makes them."""
    return [list(range(count * b // bins, count * (b + 1) // bins)) for b in range(bins)]


def loads(costs: list[RowCost], bins: list[list[int]]) -> list[int]:
    return [load(costs[row] for row in rows) for rows in bins]


def test_a_prompt_costs_once_in_a_micro_batch():
    costs = rows([3, 4], [5], prompt=10)
    assert load(costs) == 12 + 20
    assert load(costs[:2]) == 17
    assert load([RowCost(3, 30, 0), RowCost(1, 10, 0), RowCost(0, 0, 0)]) == 34
    assert load([]) == 0


def test_costs_follow_the_passes_that_rows_need():
    prompts = [Prompt([5, 6], {"prompt": "x"}, 0), Prompt([7, 8, 9], {"prompt": "y"}, 1)]
    rollouts = [Rollout(prompts[i // 2], i, [1] * (i + 1), "eos", "", "") for i in range(4)]
    batch = collate(rollouts, [0.0] * 4, mask_truncated=False)
    assert row_costs(batch) == [RowCost(3, 6, 0), RowCost(6, 6, 0), RowCost(9, 9, 1), RowCost(12, 9, 1)]
    batch.passes = torch.tensor([2, 1, 0, 1])
    assert row_costs(batch) == [RowCost(3, 6, 0), RowCost(2, 2, 0), RowCost(0, 0, 1), RowCost(4, 3, 1)]


def test_groups_stay_together_by_hand():
    """Four groups of 10, 2, 2 and 10 tokens: the plan's halves cost 12 each, two whole groups a half do too."""
    costs = rows([5, 5], [1, 1], [1, 1], [5, 5], prompt=2)
    assert loads(costs, pack(costs, in_order(8, 2))) == [16, 16]
    # Dead groups cost nothing and leave the live ones a micro-batch each.
    costs = rows([8, 8], [0, 0], [9, 7], [0, 0])
    assert loads(costs, [[0, 1, 2, 3], [4, 5, 6, 7]]) == [16, 16]
    costs = rows([8, 8], [9, 7], [0, 0], [0, 0])
    assert loads(costs, in_order(8, 2)) == [32, 0]
    packed = pack(costs, in_order(8, 2))
    assert sorted(loads(costs, packed)) == [16, 16]
    assert [0, 1] in [[row for row in part if costs[row].own] for part in packed]


def test_a_group_above_a_fair_share_is_cut():
    """One group of four rows of 6 and a prompt of 3 beside one of 3: alone it would cost 27 of 33."""
    costs = rows([6, 6, 6, 6], [1, 1, 1, 0], prompt=3)
    packed = pack(costs, in_order(8, 2))
    assert loads(costs, in_order(8, 2)) == [27, 6]
    assert max(loads(costs, packed)) <= 21


GROUPS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), min_size=1, max_size=8)


@given(GROUPS, st.integers(0, 30), st.integers(1, 9))
def test_every_row_once_and_never_worse_than_the_plan(groups: list[list[int]], prompt: int, bins: int):
    costs = rows(*groups, prompt=prompt)
    plan = in_order(len(costs), bins)
    packed = pack(costs, plan)
    assert len(packed) == bins
    assert sorted(row for part in packed for row in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in packed)
    assert max(loads(costs, packed)) <= max(loads(costs, plan))
    assert packed == pack(list(costs), [list(part) for part in plan])
    if len(costs) >= bins:
        assert all(packed)


@given(GROUPS, st.integers(0, 30), st.integers(2, 6))
def test_the_largest_load_is_bounded(groups: list[list[int]], prompt: int, bins: int):
    """Rows dealt out one by one stay below a fair share plus the largest row; what is better in sum may cost a share
    more at its largest."""
    costs = rows(*groups, prompt=prompt)
    packed = pack(costs, [list(range(len(costs))), *([] for _ in range(bins - 1))])
    single = [cost.own + cost.prompt for cost in costs]
    assert max(loads(costs, packed)) <= 2 * sum(single) / bins + max(single)


@given(GROUPS, st.integers(0, 5), st.integers(1, 6))
def test_groups_within_a_fair_share_stay_whole(groups: list[list[int]], prompt: int, bins: int):
    costs = rows(*groups, prompt=prompt)
    plan = [list(range(len(costs))), *([] for _ in range(bins - 1))]
    packed = pack(costs, plan)
    if packed == plan or len(groups) < bins:
        return
    place = {row: b for b, part in enumerate(packed) for row in part}
    fair = sum(load(c for c in costs if c.group == g) for g in range(len(groups))) / bins
    for g in range(len(groups)):
        members = [row for row, cost in enumerate(costs) if cost.group == g]
        if load(costs[row] for row in members) <= fair and all(len(part) > 1 for part in packed):
            assert len({place[row] for row in members}) == 1


@given(GROUPS, st.integers(0, 30), st.data())
def test_parts_are_not_empty(groups: list[list[int]], prompt: int, data: st.DataObject):
    costs = rows(*groups, prompt=prompt)
    parts = halves(costs, data.draw(st.integers(1, len(costs))))
    assert all(parts)
    assert sorted(row for part in parts for row in part) == list(range(len(costs)))


@pytest.mark.parametrize("parts", [2, 3])
def test_like_rows_are_cut_evenly(parts: int):
    costs = rows([4] * 12, prompt=6)
    assert loads(costs, halves(costs, parts)) == [6 + 48 // parts] * parts
