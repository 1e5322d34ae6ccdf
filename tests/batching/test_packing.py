"""Rows shared out by cost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from groupgrad.batch import LEAST_SHARED
from groupgrad.batching.collate import collate
from groupgrad.batching.packing import RowCost, pack, row_costs, split, split_to_size, total_cost
from groupgrad.objectives import FORWARD, FORWARD_AND_BACKWARD, NO_PASS
from groupgrad.types import Prompt, Rollout


def rows(*groups: list[int], prompt: int = 0) -> list[RowCost]:
    """Completion lengths, one list a group."""
    return [RowCost(length, prompt, g) for g, lengths in enumerate(groups) for length in lengths]


def in_order(count: int, bins: int) -> list[list[int]]:
    """Contiguous shares of like size, as the generation plan makes them."""
    return [list(range(count * b // bins, count * (b + 1) // bins)) for b in range(bins)]


def bin_costs(costs: list[RowCost], bins: list[list[int]]) -> list[int]:
    return [total_cost(costs[row] for row in rows) for rows in bins]


def test_a_prompt_costs_once_in_a_micro_batch():
    costs = rows([3, 4], [5], prompt=10)
    assert total_cost(costs) == 12 + 20
    assert total_cost(costs[:2]) == 17
    assert total_cost([RowCost(3, 30, 0), RowCost(1, 10, 0), RowCost(0, 0, 0)]) == 34
    assert total_cost([]) == 0


def test_costs_follow_the_passes_that_rows_need():
    prompts = [Prompt([5, 6], {"prompt": "x"}, 0), Prompt([7, 8, 9], {"prompt": "y"}, 1)]
    rollouts = [Rollout(prompts[i // 2], i, [1] * (i + 1), "eos", "", "") for i in range(4)]
    batch = collate(rollouts, [0.0] * 4, mask_truncated=False)
    costs = [RowCost(3, 6, 0), RowCost(6, 6, 0), RowCost(9, 9, 1), RowCost(12, 9, 1)]
    assert row_costs(batch, [FORWARD_AND_BACKWARD] * 4) == costs
    costs = [RowCost(3, 6, 0), RowCost(2, 2, 0), RowCost(0, 0, 1), RowCost(4, 3, 1)]
    assert row_costs(batch, [FORWARD_AND_BACKWARD, FORWARD, NO_PASS, FORWARD]) == costs


def test_what_all_prompts_begin_with_costs_once_in_a_micro_batch():
    system = list(range(100, 100 + LEAST_SHARED))
    prompts = [Prompt([*system, *ids], {"prompt": "x"}, i) for i, ids in enumerate([[5], [5, 6], []])]
    rollouts = [Rollout(prompts[i // 2], i, [1] * (i + 1), "eos", "", "") for i in range(6)]
    batch = collate(rollouts, [0.0] * 6, mask_truncated=False)
    passes = [FORWARD_AND_BACKWARD, FORWARD, FORWARD, NO_PASS, FORWARD, FORWARD]
    costs = row_costs(batch, passes, shares_beginnings=True)
    size = LEAST_SHARED
    assert costs[:2] == [RowCost(3, 3, 0, 3 * size), RowCost(2, 1, 0, size)]
    assert costs[2:] == [RowCost(3, 2, 1, size), RowCost(0, 0, 1, 0), RowCost(5, 0, 2, size), RowCost(6, 0, 2, size)]
    assert total_cost(costs) == 3 + 2 + 3 + 5 + 6 + 3 + 2 + 3 * size
    assert total_cost(costs[1:]) == total_cost(row_costs(batch, passes)[1:]) - 2 * size
    assert [batch.select(rows).common_beginning() for rows in ([1, 2], [1, 4], [0, 1])] == [size + 1, size, 0]


def test_passes_of_many_groups_behind_one_beginning():
    """Beside a beginning of 100, a part of 300 has room for two groups of 80."""
    costs = [RowCost(20, 40, group, 100) for group in range(6) for _ in range(2)]
    parts = split_to_size(costs, 300)
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert bin_costs(costs, parts) == [260] * 3
    assert split_to_size(costs, total_cost(costs)) == [list(range(12))]
    assert len(split_to_size(costs, 90)) == 6
    one = [RowCost(100, 0, 0, 100)] * 40
    assert len(split_to_size(one, 500)) == 3  # two beginnings more are 200 of 4,100


def test_attention_costs_each_token_before_and_itself():
    """A row of one token attends to 2 + 1; one of two tokens to 3 + 4; a prompt of two tokens to 1 + 2."""
    prompt = Prompt([5, 6], {"prompt": "x"}, 0)
    rollouts = [Rollout(prompt, i, [1] * (i + 1), "eos", "", "") for i in range(2)]
    batch = collate(rollouts, [0.0] * 2, mask_truncated=False)
    costs = row_costs(batch, [FORWARD_AND_BACKWARD, FORWARD], 10.0)
    assert costs == [RowCost(3 * (1 + 30), 3 * (2 + 30), 0), RowCost(2 + 70, 2 + 30, 0)]


def test_groups_that_the_plan_cut_are_joined():
    """The plan cuts the third group between a micro-batch that is full and one that is nearly empty."""
    costs = rows([8, 8], [1, 1], [8, 8], [1, 1], prompt=2)
    plan = [[0, 1, 4], [2, 3], [5], [6, 7]]
    assert bin_costs(costs, plan) == [28, 4, 10, 4]
    assert sorted(bin_costs(costs, pack(costs, plan))) == [4, 4, 18, 18]


def test_like_work_is_balanced():
    """Dead groups cost nothing and leave the live ones a micro-batch each."""
    costs = rows([8, 8], [0, 0], [9, 7], [0, 0])
    assert pack(costs, in_order(8, 2)) == in_order(8, 2)
    costs = rows([8, 8], [9, 7], [0, 0], [0, 0])
    assert bin_costs(costs, in_order(8, 2)) == [32, 0]
    packed = pack(costs, in_order(8, 2))
    assert bin_costs(costs, packed) == [16, 16]
    assert [0, 1] in [[row for row in part if costs[row].completion] for part in packed]


def test_time_comes_before_memory():
    """Cutting the one live group would balance the halves, at the price of its prompt."""
    costs = [*(RowCost(6, 3, 0) for _ in range(4)), *(RowCost(0, 0, 1) for _ in range(4))]
    assert sorted(bin_costs(costs, pack(costs, in_order(8, 2)))) == [0, 27]
    assert bin_costs(costs, split(costs, 2)) == [15, 15]


GROUPS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), min_size=1, max_size=8)


@settings(deadline=None)
@given(GROUPS, st.integers(0, 30), st.integers(1, 9))
def test_every_row_once_and_never_worse_than_the_plan(groups: list[list[int]], prompt: int, bins: int):
    costs = rows(*groups, prompt=prompt)
    plan = in_order(len(costs), bins)
    packed = pack(costs, plan)
    assert len(packed) == bins
    assert sorted(row for part in packed for row in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in packed)
    assert max(bin_costs(costs, packed)) <= max(bin_costs(costs, plan))
    assert sum(bin_costs(costs, packed)) <= sum(bin_costs(costs, plan))
    assert packed == pack(list(costs), [list(part) for part in plan])
    if len(costs) >= bins and packed != plan:
        assert all(packed)


def test_groups_are_cut_where_that_makes_the_largest_part_smaller():
    costs = rows([1, 1, 1], [1, 1, 1], [1, 1, 1], prompt=0)
    assert sorted(bin_costs(costs, split(costs, 2))) == [4, 5]
    assert sorted(bin_costs(costs, split(costs, 2, keeps_groups=True))) == [3, 6]
    alike = rows([4] * 12, prompt=6)
    assert bin_costs(alike, split(alike, 3)) == [6 + 48 // 3] * 3


@settings(deadline=None)
@given(GROUPS, st.integers(0, 30), st.data())
def test_the_largest_part_is_bounded(groups: list[list[int]], prompt: int, data: st.DataObject):
    """List scheduling: at most a fair share and the largest piece more; single rows are among the pieces tried. A bin
    that got a row so as not to stay empty holds that row alone."""
    costs = rows(*groups, prompt=prompt)
    parts = data.draw(st.integers(1, len(costs)))
    single = [cost.completion + cost.prompt for cost in costs]
    found = split(costs, parts)
    assert max(bin_costs(costs, found)) <= sum(single) / parts + max(single)
    assert all(found)
    assert sorted(row for part in found for row in part) == list(range(len(costs)))


@settings(deadline=None)
@given(GROUPS, st.integers(0, 5), st.integers(1, 6))
def test_groups_within_a_fair_share_stay_whole(groups: list[list[int]], prompt: int, bins: int):
    costs = rows(*groups, prompt=prompt)
    plan = [list(range(len(costs))), *([] for _ in range(bins - 1))]
    packed = pack(costs, plan)
    if packed == plan or len(groups) < bins:
        return
    place = {row: b for b, part in enumerate(packed) for row in part}
    fair = sum(total_cost(c for c in costs if c.group == g) for g in range(len(groups))) / bins
    for g in range(len(groups)):
        members = [row for row, cost in enumerate(costs) if cost.group == g]
        if total_cost(costs[row] for row in members) <= fair and all(len(part) > 1 for part in packed):
            assert len({place[row] for row in members}) == 1
