"""Advantages: worked numbers, missing rewards, invariances and extremes; reward metrics."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupgrad.objectives import compute_advantages, reward_metrics

NAN = math.nan


def advantages(rewards, group, weights=None, **options):
    table = torch.tensor(rewards, dtype=torch.float64)
    table = table.unsqueeze(1) if table.ndim == 1 else table
    return compute_advantages(table, [1.0] * table.shape[1] if weights is None else weights, group, **options)


def test_normalize_then_sum():
    rewards = [[1, 0], [0, 10], [0, 10], [1, 0]]
    result = advantages(rewards, 2, [1.0, 0.5], aggregation="normalize_then_sum")
    a = 0.865813
    assert result.advantages.tolist() == pytest.approx([a, -a, -a, a], abs=1e-6)
    assert result.combined.tolist() == [1, 5, 5, 1]


def test_normalize_then_sum_signals_by_function_and_leaves_out_single_scores():
    # The sum is 1 everywhere, yet both functions vary in group 0; in group 1 neither has two scores.
    rewards = [[1, 0], [0, 1], [7, NAN], [NAN, 9]]
    result = advantages(rewards, 2, [2.0, 1.0], aggregation="normalize_then_sum")
    z = 0.5 / (math.sqrt(0.5) + 1e-4)
    expected = z / (math.sqrt(2) * z + 1e-4)
    assert result.advantages.tolist() == pytest.approx([expected, -expected, 0, 0], abs=1e-12)
    assert result.zero_std.tolist() == [False, False, True, True]
    assert advantages(rewards, 2, [0.0, 0.0], aggregation="normalize_then_sum").zero_std.all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[NAN, 5.0, NAN, NAN], [NAN] * 4, [0.1] * 4, [1e6 + 0.1] * 4, [-1e6] * 4])
def test_groups_without_signal_are_exactly_zero(rewards, scale):
    result = advantages([*rewards, 0, 1, 0, 1], 4, scale_rewards=scale)
    assert result.advantages[:4].tolist() == [0, 0, 0, 0]
    assert result.zero_std.tolist() == [True] * 4 + [False] * 4
    assert not result.advantages.isnan().any()


def test_a_batch_with_one_score_is_zero():
    for scale in ("group", "batch", "none"):
        assert advantages([3.0, NAN], 2, scale_rewards=scale).advantages.tolist() == [0, 0]


def test_groups_of_one_and_no_rows():
    result = advantages([3.0, 4.0], 1)
    assert result.advantages.tolist() == [0, 0] and result.zero_std.all()
    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        empty = compute_advantages(torch.zeros(0, 2), [1.0, 1.0], 4, aggregation=aggregation)
        assert empty.advantages.shape == (0,) and empty.zero_std.shape == (0,)


@pytest.mark.parametrize("value", [1e6, -1e6])
def test_large_rewards_keep_their_differences(value):
    small, large = advantages([1, 0, 0, 1], 4), advantages([value + 1, value, value, value + 1], 4)
    assert large.advantages.tolist() == pytest.approx(small.advantages.tolist(), abs=1e-9)
    spread = advantages([value, -value], 2).advantages.tolist()
    assert spread == pytest.approx([math.copysign(math.sqrt(0.5), value), -math.copysign(math.sqrt(0.5), value)])


tables = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@settings(max_examples=50, deadline=None)
@given(rng=tables, groups=st.integers(1, 4), size=st.integers(1, 5), functions=st.integers(1, 3))
def test_against_a_plain_calculation(rng, groups, size, functions):
    rewards = rng.normal(size=(groups * size, functions)).round(1)
    rewards[rng.random(rewards.shape) < 0.3] = NAN
    weights = rng.normal(size=functions)
    kept = [[k for k in range(functions) if not math.isnan(row[k])] for row in rewards]
    sums = [sum(weights[k] * row[k] for k in ks) if ks else None for row, ks in zip(rewards, kept)]
    result = compute_advantages(torch.from_numpy(rewards), torch.from_numpy(weights), size)
    for start in range(0, groups * size, size):
        scored = [value for value in sums[start : start + size] if value is not None]
        for row in range(start, start + size):
            expected = 0.0
            if sums[row] is not None and len(scored) > 1:
                expected = (sums[row] - statistics.mean(scored)) / (statistics.stdev(scored) + 1e-4)
            assert result.advantages[row].item() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(rng=tables, aggregation=st.sampled_from(["sum_then_normalize", "normalize_then_sum"]))
def test_an_unscored_function_and_unscored_rows_are_neutral(rng, aggregation):
    rewards = torch.from_numpy(rng.normal(size=(8, 2)))
    plain = compute_advantages(rewards, [1.0, 0.5], 4, "group", aggregation).advantages
    extra = torch.cat([rewards, torch.full((8, 1), NAN, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(compute_advantages(extra, [1.0, 0.5, 9.0], 4, "group", aggregation).advantages, plain)
    hole = torch.full((2, 1, 2), NAN, dtype=torch.float64)
    wider = torch.cat([rewards.view(2, 4, 2), hole], dim=1).view(10, 2)
    result = compute_advantages(wider, [1.0, 0.5], 5, "group", aggregation).advantages.view(2, 5)
    torch.testing.assert_close(result[:, :4].reshape(-1), plain)
    assert result[:, 4].tolist() == [0, 0]


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="scale_rewards='all' is not known; set one of 'group', 'batch', 'none'"):
        advantages([1, 2], 2, scale_rewards="all")
    with pytest.raises(ValueError, match="multi_objective_aggregation='sum'"):
        advantages([1, 2], 2, aggregation="sum")
    with pytest.raises(ValueError, match=r"row 1 has an infinite reward \(\[inf\]\)"):
        advantages([1, math.inf], 2)
    with pytest.raises(ValueError, match="3 rows are not whole groups of num_generations=2"):
        advantages([1, 2, 3], 2)
    with pytest.raises(ValueError, match="one weight a column"):
        advantages([1, 2], 2, [1.0, 2.0])


def test_reward_metrics():
    rewards = torch.tensor([[1, NAN], [2, 4], [NAN, NAN], [NAN, NAN]], dtype=torch.float64)
    result = compute_advantages(rewards, [1.0, 0.5], 2)
    metrics = {key: metric.read() for key, metric in reward_metrics(rewards, ["a", "b"], result).items()}
    assert metrics == {
        "reward": pytest.approx(2.5),
        "reward_std": pytest.approx(math.sqrt(4.5)),
        "frac_reward_zero_std": 0.5,
        "rewards/a/mean": pytest.approx(1.5),
        "rewards/a/std": pytest.approx(math.sqrt(0.5)),
        "rewards/b/mean": 4.0,
        "rewards/b/std": None,
    }


def test_reward_metrics_without_scores():
    rewards = torch.full((2, 1), NAN)
    metrics = reward_metrics(rewards, ["a"], compute_advantages(rewards, [1.0], 2))
    assert metrics["reward"].read() is None and metrics["reward_std"].read() is None
    assert metrics["rewards/a/mean"].read() is None and metrics["frac_reward_zero_std"].read() == 1
