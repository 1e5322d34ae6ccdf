"""Ranks and micro-batches of the rows of a generation batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from groupgrad.batching.generation_plan import GenerationPlan

SMALL = st.integers(1, 4)


@st.composite
def plans(draw: st.DrawFn) -> GenerationPlan:
    b, n, accumulation, steps, mu = (draw(SMALL) for _ in range(5))
    total = b * n * steps
    divisors = [g for g in range(1, total + 1) if total % g == 0]
    seed = draw(st.sampled_from([None, 1, 2]))
    return GenerationPlan(b, n, accumulation, steps, mu, draw(st.sampled_from(divisors)), seed)


def rows_of_steps(plan: GenerationPlan, num_steps: int) -> list[list[tuple[int, int]]]:
    """(generation batch, row) of every optimizer step, sorted, over all ranks, as the loop takes its micro-batches."""
    steps = []
    for step in range(num_steps):
        rows = []
        for micro_step in range(step * plan.accumulation, (step + 1) * plan.accumulation):
            number, position = divmod(micro_step, plan.micro_batches_per_generation)
            for rank in range(plan.world_size):
                rows += [(number, row) for row in plan.slice_rows(rank, position % plan.steps_per_generation, number)]
        steps.append(sorted(rows))
    return steps


@given(plans())
@settings(max_examples=150, deadline=None)
def test_every_row_belongs_to_one_slice_of_one_rank(plan: GenerationPlan):
    rows = [
        row
        for rank in range(plan.world_size)
        for s in range(plan.steps_per_generation)
        for row in plan.slice_rows(rank, s)
    ]
    assert sorted(rows) == list(range(plan.generation_batch_size))
    assert all(
        len(plan.slice_rows(rank, s)) == plan.micro_batch_rows
        for rank in range(plan.world_size)
        for s in range(plan.steps_per_generation)
    )


@given(plans())
@settings(max_examples=100, deadline=None)
def test_rank_rows_are_its_slices_ascending_and_its_groups_cover_them(plan: GenerationPlan):
    for rank in range(plan.world_size):
        rows = plan.rank_rows(rank)
        assert rows == sorted(rows)
        places = [place for s in range(plan.steps_per_generation) for place in plan.places(rank, s)]
        assert sorted(places) == list(range(len(rows)))
        assert [rows[place] for place in plan.places(rank, 0)] == list(plan.slice_rows(rank, 0))
        assert set(rows) == {row for s in range(plan.steps_per_generation) for row in plan.slice_rows(rank, s)}
    assert plan.prompts_per_generation * plan.num_generations == plan.generation_batch_size


@given(b=SMALL, n=SMALL, accumulation=SMALL, factor=SMALL, seed=st.none() | SMALL)
@settings(max_examples=200, deadline=None)
def test_step_content_depends_on_its_size_and_seed_alone(b, n, accumulation, factor, seed):
    size = b * n * accumulation
    plan = GenerationPlan(b, n, accumulation, accumulation * factor, 1, 1, seed)
    alone = GenerationPlan(size, 1, 1, factor, 1, 1, seed)
    steps = rows_of_steps(plan, 2 * factor)
    assert steps == rows_of_steps(alone, 2 * factor)
    assert all(len(step) == size for step in steps)
    rows = [(number, row) for number in (0, 1) for row in range(size * factor)]
    assert sorted(row for step in steps for row in step) == rows
    assert seed is not None or steps[0] == rows[:size]


def test_shuffled_steps_mix_groups_and_differ_between_generation_batches():
    plan = GenerationPlan(8, 1, 1, 4, 1, 8, shuffle_seed=3)
    steps = [plan.slice_rows(0, s) for s in range(4)]
    assert all(len({row // 8 for row in step}) > 1 for step in steps)
    assert all(list(step) == sorted(step) for step in steps)
    assert steps != [plan.slice_rows(0, s, 1) for s in range(4)]
    assert steps != [replace(plan, shuffle_seed=4).slice_rows(0, s) for s in range(4)]
    whole = replace(plan, accumulation=4)
    assert [row for s in range(4) for row in whole.slice_rows(0, s)] == list(range(32))


@given(b=SMALL, n=SMALL, steps=SMALL, factor=SMALL)
@settings(max_examples=150, deadline=None)
def test_step_content_is_whole_generation_batches_when_steps_hold_whole_ones(b, n, steps, factor):
    plan = GenerationPlan(b, n, steps * factor, steps, 1, 1)
    per_batch = b * n * steps
    expected = [(number, row) for number in range(factor) for row in range(per_batch)]
    assert rows_of_steps(plan, 2)[0] == expected
    assert rows_of_steps(plan, 2)[1] == [(number + factor, row) for number, row in expected]


@given(b=SMALL, n=SMALL, accumulation=SMALL, factor=SMALL, mu=SMALL)
@settings(max_examples=100, deadline=None)
def test_each_iteration_trains_the_same_steps_again(b, n, accumulation, factor, mu):
    plan = GenerationPlan(b, n, accumulation, accumulation * factor, mu, 1)
    steps = rows_of_steps(plan, factor * mu)
    assert steps == steps[:factor] * mu


@given(b=SMALL, n=SMALL, accumulation=SMALL, factor=SMALL, groups=SMALL)
@settings(max_examples=100, deadline=None)
def test_groups_are_whole_on_a_rank_when_its_share_of_a_step_holds_whole_groups(b, n, accumulation, factor, groups):
    share = b * accumulation
    assume(share % groups == 0)
    plan = GenerationPlan(b, n, accumulation, accumulation * factor, 1, share // groups)
    held = [set(plan.rank_groups(rank)) for rank in range(n)]
    assert sum(len(part) for part in held) == plan.prompts_per_generation
    assert set.union(*held) == set(range(plan.prompts_per_generation))
    assert not plan.moves_rows, "they are those that the rank trains"


@given(plans())
@settings(max_examples=150, deadline=None)
def test_every_row_is_sampled_once_in_whole_groups_wherever_sizes_allow(plan: GenerationPlan):
    sampled = [plan.sampled_rows(rank) for rank in range(plan.world_size)]
    assert sorted(row for rows in sampled for row in rows) == list(range(plan.generation_batch_size))
    assert {len(rows) for rows in sampled} == {plan.rows_per_rank}
    held = [{row // plan.num_generations for row in rows} for rows in sampled]
    assert [plan.rank_groups(rank) for rank in range(plan.world_size)] == [sorted(groups) for groups in held]
    are_whole = sum(map(len, held)) == plan.prompts_per_generation
    assert are_whole == plan.samples_whole_groups == (plan.rows_per_rank % plan.num_generations == 0)
    moved = [rows != plan.rank_rows(rank) for rank, rows in enumerate(sampled)]
    assert plan.moves_rows or not any(moved)


def test_the_worked_example():
    """b=2, n=2, GA=2, S=4: two steps of 8 rows; within a step rank 0 takes the first four."""
    plan = GenerationPlan(2, 2, 2, 4, 1, 4)
    assert [list(plan.slice_rows(0, s)) for s in range(4)] == [[0, 1], [2, 3], [8, 9], [10, 11]]
    assert [list(plan.slice_rows(1, s)) for s in range(4)] == [[4, 5], [6, 7], [12, 13], [14, 15]]
    assert plan.rank_groups(0) == [0, 2]
    assert plan.rank_groups(1) == [1, 3]


@pytest.mark.parametrize(
    ("accumulation", "steps", "mu", "expected"),
    [
        (1, 1, 1, True),
        (4, 4, 1, True),
        (4, 2, 1, True),
        (4, 2, 2, True),
        (4, 1, 4, True),
        (1, 2, 1, False),
        (2, 4, 1, False),
        (4, 4, 2, False),
        (1, 1, 2, False),
        (2, 3, 1, False),
        (3, 2, 1, False),
    ],
)
def test_on_policy_truth_table(accumulation, steps, mu, expected):
    """On policy means: no optimizer step ends while a generation batch still has micro-batches to give."""
    plan = GenerationPlan(1, 1, accumulation, steps, mu, 1)
    assert plan.is_on_policy is expected
    step_ends = {k * accumulation for k in range(1, 100)}
    inside = any(end % plan.micro_batches_per_generation for end in step_ends)
    assert plan.is_on_policy is not inside
