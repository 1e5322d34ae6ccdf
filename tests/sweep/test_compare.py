"""Comparison of arms: paired differences, Student's tail, and what halving keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from groupgrad.apps.sweep.compare import compared_steps, difference, judge
from groupgrad.apps.sweep.store import PromptRewards
from groupgrad.apps.sweep.sweep_plan import Halving
from groupgrad.evaluation.statistics import student_quantile, student_tail


def steps(*means: float, prompts: str = "p") -> dict[int, PromptRewards]:
    """One step whose prompts have these means."""
    keys = tuple(f"{prompts}{index}" for index in range(len(means)))
    return {1: PromptRewards(keys, {"reward": means})}


@pytest.mark.parametrize(
    ("t", "freedom", "tail"),
    # Upper quantiles from Student's published tables; one degree of freedom is Cauchy's distribution.
    [(12.706, 1, 0.025), (2.571, 5, 0.025), (2.764, 10, 0.01), (1.697, 30, 0.05), (1.960, 1e5, 0.025), (0.0, 4, 0.5)],
)
def test_students_tail(t, freedom, tail):
    assert student_tail(t, freedom) == pytest.approx(tail, rel=2e-3)
    assert student_tail(-t, freedom) == pytest.approx(1 - tail, rel=2e-3)
    assert student_quantile(tail, freedom) == pytest.approx(t, rel=1e-3, abs=1e-6)
    assert student_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, abs=1e-6)


def test_a_paired_difference_leaves_out_what_prompts_have_in_common():
    hard = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    better, worse = hard + np.array([0.1, 0.2, 0.1, 0.2, 0.1, 0.2]), hard
    found = difference(steps(*better), steps(*worse), "reward")
    assert found.is_paired
    assert found.num == 6
    assert found.mean == pytest.approx(0.15)
    assert found.error == pytest.approx(math.sqrt(0.0025 * 6 / 5 / 6))
    assert found.p_value == pytest.approx(student_tail(0.15 / found.error, 5))
    apart = difference(steps(*better), steps(*worse, prompts="q"), "reward")
    assert not apart.is_paired
    assert apart.mean == pytest.approx(0.15)
    assert apart.p_value > 0.4


def test_prompts_that_one_arm_has_no_reward_for_are_left_out():
    found = difference(steps(1.0, math.nan, 3.0, 2.0), steps(0.5, 7.0, math.nan, 1.0), "reward")
    assert found.num == 2
    assert found.mean == pytest.approx(0.75)


def arms() -> dict[int, dict[int, PromptRewards]]:
    """Four arms: 1 and 2 hardly differ, 3 is a little worse with much noise, 4 is clearly worse."""
    noise = np.array([0.3, -0.3, 0.2, -0.2, 0.1, -0.1, 0.25, -0.25])
    base = np.linspace(0.2, 0.8, 8)
    rows = {1: base, 2: base - 0.01 + noise / 10, 3: base - 0.05 + noise, 4: base - 0.4 + noise / 10}
    return {arm: steps(*values) for arm, values in rows.items()}


def test_halving_keeps_the_better_half_and_states_what_is_clear():
    verdicts = {verdict.arm: verdict for verdict in judge(arms(), "reward", Halving(), 3)}
    assert [arm for arm, verdict in verdicts.items() if verdict.goes_on] == [1, 2]
    assert [arm for arm, verdict in verdicts.items() if verdict.is_clear] == [4]
    assert "clearly worse, dropped" in verdicts[4].text
    assert "not clearly worse, dropped" in verdicts[3].text
    assert verdicts[1].text == "mean 0.500, the best"


def test_undecided_arms_may_be_kept():
    verdicts = judge(arms(), "reward", Halving(undecided="keep"), 3)
    assert [verdict.arm for verdict in verdicts if verdict.goes_on] == [1, 2, 3]


def test_equal_arms_are_called_clearly_worse_no_more_often_than_stated():
    rng, halving, num_wrong = np.random.default_rng(0), Halving(confidence=0.9), 0
    for _ in range(120):
        prompts = rng.normal(size=24)
        equal = {arm: steps(*(prompts + rng.normal(scale=0.5, size=24))) for arm in range(4)}
        num_wrong += any(verdict.is_clear for verdict in judge(equal, "reward", halving, 1) if verdict.arm == 0)
    assert num_wrong / 120 <= 0.1


def test_the_steps_behind_the_last_rung_are_compared():
    assert [compared_steps(step, [5, 10, 20]) for step in (5, 10, 20)] == [2, 7, 15]
