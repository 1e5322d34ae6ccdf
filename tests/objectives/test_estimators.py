"""Advantage estimators: numbers worked by hand, gradients over all groups that can be drawn, missing rewards."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from groupgrad.objectives import ESTIMATORS, compute_advantages, find_estimator
from groupgrad.objectives.estimators.pass_at_k import Settings

NAN = math.nan
PROBS = np.array([0.5, 0.3, 0.2])


def advantages(estimator, rewards, group=None, *, lengths=None, **settings):
    table = torch.tensor(rewards, dtype=torch.float64).unsqueeze(1)
    made = find_estimator(estimator).make_settings(settings)
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.float64)
    return compute_advantages(
        table, [1.0], len(rewards) if group is None else group, estimator=estimator, settings=made, lengths=given
    )


def values(estimator, rewards, group=None, **more):
    return advantages(estimator, rewards, group, **more).advantages.tolist()


def test_worked_numbers():
    assert values("maxrl", [1, 0, 0, 0]) == pytest.approx([3, -1, -1, -1])
    assert values("maxrl", [1, 1, 0, 0]) == pytest.approx([1, 1, -1, -1])
    assert values("rloo", [1, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert values("opo", [1, 0], lengths=[30, 10]) == pytest.approx([0.25, -0.75])
    assert values("reinforce_plus_plus_baseline", [1, 0], lengths=[3, 1]) == pytest.approx([0.5, -1.5])
    assert values("pass_at_k", [0, 0, 0, 1], k=2) == pytest.approx([0, 0, 0, 2])
    assert values("pass_at_k", [0, 3, 5, 1], k=4) == pytest.approx([0, 0, 4 * (5 - 3), 0])
    assert values("pass_at_k", [1, 0, 0], k=1) == values("rloo", [1, 0, 0])


def best(subset):
    return max(subset) if subset else 0.0


@pytest.mark.parametrize("k", [2, 3, 5, 6])
def test_pass_at_k_is_the_sum_over_all_sets(k):
    rewards = [0.5, -1.0, 2.0, 2.0, 0.25, 1.0]
    expected = [0.0] * 6
    for chosen in itertools.combinations(range(6), k):
        for row in chosen:
            rest = [rewards[other] for other in chosen if other != row]
            expected[row] += best([rewards[other] for other in chosen]) - best(rest)
    scale = 6 / math.comb(6, k)
    assert values("pass_at_k", rewards, k=k) == pytest.approx([scale * value for value in expected])


def expected_gradient(estimator, rewards, size, **settings):
    """The mean over all groups of `size` samples of mean(A grad log p), by the logits of three outcomes."""
    total = np.zeros(3)
    for drawn in itertools.product(range(3), repeat=size):
        found = np.array(values(estimator, [rewards[one] for one in drawn], **settings))
        scores = np.eye(3)[list(drawn)] - PROBS
        total += PROBS[list(drawn)].prod() * (found[:, None] * scores).mean(axis=0)
    return total


def gradient_of(function):
    """The gradient of a function of the three probabilities, by their logits."""
    logits = torch.tensor(np.log(PROBS), requires_grad=True)
    function(torch.softmax(logits, dim=0)).backward()
    return logits.grad.numpy()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_has_the_gradient_of_the_expected_best_of_k(k):
    rewards = [0.0, 1.0, 2.5]
    below = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)

    def expected_best(probs):
        reach = probs.cumsum(0) ** k  # the best of k is at most this outcome
        return (below * torch.diff(reach, prepend=torch.zeros(1, dtype=torch.float64))).sum()

    found = expected_gradient("pass_at_k", rewards, 4, k=k)
    np.testing.assert_allclose(found, gradient_of(expected_best), atol=1e-12)


def test_rloo_has_the_gradient_of_the_expected_reward():
    rewards = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)
    found = expected_gradient("rloo", rewards.tolist(), 3)
    np.testing.assert_allclose(found, gradient_of(lambda probs: (probs * rewards).sum()), atol=1e-12)


def test_maxrl_has_the_gradient_of_the_series_of_the_log_pass_rate():
    """Up to the order G - 1: a group without a success, the G-th order, gives 0."""

    def series(probs):
        failure = probs[:2].sum()
        return sum((1 - failure**k) / k for k in range(1, 4))

    found = expected_gradient("maxrl", [0.0, 0.0, 1.0], 4)
    np.testing.assert_allclose(found, gradient_of(series), atol=1e-12)


def test_whitening_is_over_the_tokens_of_all_groups():
    rewards, lengths = [1.0, 0.0, 2.0, 2.0], [5, 2, 1, 7]
    deviations = np.array([0.5, -0.5, 0.0, 0.0])
    by_token = np.repeat(deviations, lengths)
    expected = (deviations - by_token.mean()) / np.sqrt(by_token.var(ddof=1) + 1e-8)
    assert values("reinforce_plus_plus_baseline", rewards, 2, lengths=lengths) == pytest.approx(expected.tolist())


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_unscored_rows_touch_nothing(name):
    rewards, lengths, settings = [1.0, 0.0, 0.0, 1.0], [3, 4, 5, 6], {"k": 3} if name == "pass_at_k" else {}
    full = values(name, rewards, lengths=lengths, **settings)
    holed = values(name, [1.0, NAN, 0.0, 0.0, NAN, 1.0], lengths=[3, 9, 4, 5, 1, 6], **settings)
    assert [holed[row] for row in (0, 2, 3, 5)] == pytest.approx(full)
    assert (holed[1], holed[4]) == (0.0, 0.0)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 4, [NAN, 1.0, NAN, NAN], [NAN] * 4])
def test_groups_without_a_signal(name, rewards):
    result = advantages(name, rewards, lengths=[1, 2, 3, 4])
    assert result.zero_std.all() and result.advantages.tolist() == [0.0] * 4
    empty = compute_advantages(torch.zeros(0, 1), [1.0], 4, estimator=name, lengths=torch.zeros(0))
    assert empty.advantages.shape == (0,)


def test_equal_rewards_are_exactly_zero_though_their_mean_is_not_exact():
    for name in set(ESTIMATORS) - {"maxrl"}:
        for value in (0.1, 1e12 + 0.1):
            assert values(name, [value] * 3, lengths=[1, 2, 3], **({"k": 2} if name == "pass_at_k" else {})) == [0] * 3


def test_pass_at_k_says_which_groups_teach():
    """One failure among four: each set of three has a success without any one row."""
    assert advantages("pass_at_k", [1, 1, 1, 0], k=3).zero_std.all()
    assert not advantages("pass_at_k", [1, 1, 1, 0], k=2).advantages.tolist()[3]
    assert advantages("pass_at_k", [1, 0, NAN, NAN], k=3).zero_std.all(), "no set of three was scored"
    large = values("pass_at_k", [0.0] * 255 + [1.0], k=128)
    assert large[-1] == pytest.approx(128.0) and not any(large[:-1]), "256 / C(256, 128) * C(255, 127)"


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"'maxrl' is for rewards of 0 or 1, but row 2 has 0\.5"):
        advantages("maxrl", [1, 0, 0.5, 0])
    for name in ("opo", "reinforce_plus_plus_baseline"):
        with pytest.raises(ValueError, match=f"advantage_estimator='{name}' needs the lengths of completions"):
            advantages(name, [1, 0])
    for k in (0, -1, 2.5, "4"):
        with pytest.raises(ValueError, match=f"advantage_settings has k={k}, which is no number of samples"):
            Settings(k)
    with pytest.raises(ValueError, match="advantage_settings has 'n', but it has k"):
        find_estimator("pass_at_k").make_settings({"n": 4})
    with pytest.raises(ValueError, match="advantage_settings has 'k', but this advantage_estimator has none"):
        find_estimator("rloo").make_settings({"k": 4})
    with pytest.raises(ValueError, match="advantage_estimator='rlo' is not known: did you mean 'rloo'"):
        find_estimator("rlo")


def test_a_module_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "estimators_of_mine").mkdir()
    (tmp_path / "estimators_of_mine" / "empty.py").write_text("")
    (tmp_path / "estimators_of_mine" / "raw.py").write_text(
        "from groupgrad.objectives import Estimate, Estimator\n"
        "ESTIMATOR = Estimator(lambda groups, options: Estimate(groups.rewards))\n"
    )
    assert values("estimators_of_mine.raw", [1.0, 0.5]) == [1.0, 0.5]
    with pytest.raises(ValueError, match=r"has no ESTIMATOR of type groupgrad.objectives.Estimator"):
        find_estimator("estimators_of_mine.empty")
