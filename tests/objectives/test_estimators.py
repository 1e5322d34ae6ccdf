"""Advantage estimators: gradients over all groups that can be drawn, missing rewards, groups without a signal."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from groupgrad.objectives import ESTIMATORS, compute_advantages, find_estimator
from groupgrad.types import Turns

NAN = math.nan
PROBS = np.array([0.5, 0.3, 0.2])


def advantages(estimator, rewards, group=None, *, lengths=None, turns=None, scale="group", **settings):
    """`rewards` are one number a row; those that credit turns get rows of one turn, if no `turns` are given."""
    table = torch.tensor(rewards, dtype=torch.float64).unsqueeze(1)
    found = find_estimator(estimator)
    if found.uses_turns and turns is None:
        counts = lengths or [1] * len(rewards)
        turns = [Turns([count], row.unsqueeze(0), ["start"]) for count, row in zip(counts, table)]
    return compute_advantages(
        *(table, [1.0], len(rewards) if group is None else group, scale),
        estimator=estimator,
        settings=found.make_settings(settings),
        lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.float64),
        turns=turns,
    )


def by_turn(estimator, rewards, lengths=None, states=None, group=None, scale="none", **settings):
    """Advantages of the turns of each row, from their rewards; equal turns begin in equal states by default."""
    counts = lengths or [[1] * len(row) for row in rewards]
    given = states or [[f"turn {turn}" for turn in range(len(row))] for row in rewards]
    turns = [
        Turns(count, torch.tensor(row, dtype=torch.float64).unsqueeze(1), state)
        for count, row, state in zip(counts, rewards, given)
    ]
    sums = [float(np.nansum(row)) if not np.isnan(row).all() else NAN for row in rewards]
    result = advantages(estimator, sums, group, turns=turns, scale=scale, **settings)
    return [values.tolist() for values in result.by_turn], result


def values(estimator, rewards, group=None, **more):
    return advantages(estimator, rewards, group, **more).advantages.tolist()


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
    empty = compute_advantages(torch.zeros(0, 1), [1.0], 4, estimator=name, lengths=torch.zeros(0), turns=[])
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


@pytest.mark.parametrize("name", ["turn_returns", "gigpo"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_one_turn_a_completion_is_group_to_the_bit(name, scale):
    rewards = [0.3, 1.0, -0.2, 0.7, 2.0, 2.0, 0.1, NAN]
    settings = {"omega": 0.0} if name == "gigpo" else {}
    plain = advantages("group", rewards, 4, scale=scale)
    turned = advantages(name, rewards, 4, scale=scale, **settings)
    assert turned.advantages.tolist() == plain.advantages.tolist()
    assert turned.zero_std.tolist() == plain.zero_std.tolist()


def test_rows_without_a_reward_have_zeros_for_each_turn():
    for name in ("turn_returns", "gigpo"):
        found, result = by_turn(name, [[1.0, 0.0], [NAN, NAN], [0.0, NAN]])
        assert found[1] == [0.0, 0.0] and len(found[2]) == 2
        assert result.advantages.tolist()[1] == 0.0


def test_what_cannot_work_is_refused():
    for name in ("turn_returns", "gigpo"):
        with pytest.raises(ValueError, match=f"advantage_estimator='{name}' needs the turns of completions"):
            compute_advantages(torch.zeros(2, 1), [1.0], 2, estimator=name)
        for discount in (-0.1, 1.5, NAN, "1"):
            with pytest.raises(ValueError, match=f"advantage_settings has discount={discount!r}"):
                find_estimator(name).make_settings({"discount": discount})
    for name, value in {"omega": -1, "state": 3}.items():
        with pytest.raises(ValueError, match=f"advantage_settings has {name}={value}"):
            find_estimator("gigpo").make_settings({name: value})
    with pytest.raises(ValueError, match="advantage_settings has omega=inf"):
        find_estimator("gigpo").make_settings({"omega": math.inf})
    with pytest.raises(ValueError, match=r"'maxrl' is for rewards of 0 or 1, but the sum of row 2 is 0\.5"):
        advantages("maxrl", [1, 0, 0.5, 0])
    halved = compute_advantages(torch.tensor([[1.0, 7], [0, 8]]).double(), [0.5, 0.0], 2, estimator="maxrl")
    assert halved.advantages.tolist() == [1.0, -1.0], "the weight of a single function does not matter"
    for name in ("opo", "reinforce_plus_plus_baseline"):
        with pytest.raises(ValueError, match=f"advantage_estimator='{name}' needs the lengths of completions"):
            advantages(name, [1, 0])
    for k in (0, -1):
        with pytest.raises(ValueError, match=f"has k={k}, which is no number of samples. Set it to 1 or more"):
            find_estimator("pass_at_k").make_settings({"k": k})
    for k in (2.5, "4", True):
        with pytest.raises(ValueError, match=f"advantage_settings has k={k!r}, which is no whole number"):
            find_estimator("pass_at_k").make_settings({"k": k})
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
