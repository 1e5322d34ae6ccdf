"""Majority votes, intervals and p-values: numbers by hand and over all outcomes."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from groupgrad.evaluation.statistics import bootstrap_interval, majority_at_k, sign_flip_p


def vote(answers: list[str | None], right: dict[str, bool]) -> float:
    """The share of the most frequent answers that are right."""
    counts = Counter(answer for answer in answers if answer is not None)
    best = [answer for answer, count in counts.items() if count == max(counts.values())]
    return sum(right[answer] for answer in best) / len(best) if best else 0.0


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        (["7", "7", "8"], 3, 1.0),
        (["7", "8", "8"], 3, 0.0),
        (["7", "8", "7", "8"], 4, 1 / 2),  # a tie of two answers, one of them right
        (["7", "8", "9"], 3, 1 / 3),
        (["7", "8", "8"], 1, 1 / 3),  # one vote: the share of right completions
        (["7", "8", "8"], 2, 1 / 3),  # the pairs 7 8 (a tie), 7 8 and 8 8
        (["7", None, None], 3, 1.0),  # a completion without an answer has no vote
        (["7", None, None], 2, 2 / 3),
        ([None, None], 2, 0.0),
        (["7"], 2, math.nan),
    ],
)
def test_a_majority_by_hand(answers: list[str | None], k: int, expected: float) -> None:
    right = [answer == "7" for answer in answers]
    assert majority_at_k(answers, right, k) == pytest.approx(expected, rel=1e-15, nan_ok=True)


def test_a_majority_is_the_mean_over_all_subsets() -> None:
    generator = np.random.default_rng(0)
    for _ in range(40):
        answers = [["1", "2", "3", "4", None][number] for number in generator.integers(5, size=7)]
        right = {"1": True, "2": True, "3": False, "4": False}
        marks = [answer is not None and right[answer] for answer in answers]
        for k in range(1, 8):
            votes = [vote(list(subset), right) for subset in itertools.combinations(answers, k)]
            assert majority_at_k(answers, marks, k) == pytest.approx(sum(votes) / len(votes), rel=1e-13)


def test_an_answer_that_is_right_in_some_completions_counts_with_their_share() -> None:
    assert majority_at_k(["7", "7", "7", "8"], [True, False, False, False], 4) == pytest.approx(1 / 3)


def test_the_expected_majority_of_a_model_of_three_tokens() -> None:
    """Over all samples of n tokens, the estimate has the probability that the majority of k tokens is right."""
    p, right = {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": False, "b": True, "c": False}

    def expected(k: int) -> float:
        outcomes = itertools.product(p, repeat=k)
        return math.fsum(math.prod(p[token] for token in tokens) * vote(list(tokens), right) for tokens in outcomes)

    for k in range(1, 6):
        estimates = [
            math.prod(p[token] for token in tokens) * majority_at_k(tokens, [right[token] for token in tokens], k)
            for tokens in itertools.product(p, repeat=5)
        ]
        assert math.fsum(estimates) == pytest.approx(expected(k), rel=1e-12)


def test_many_completions_do_not_overflow() -> None:
    answers = ["7"] * 100 + ["8"] * 99 + [str(number) for number in range(100, 157)]
    assert 0.5 < majority_at_k(answers, [answer == "7" for answer in answers], 128) < 0.6


def test_an_interval_has_the_quantiles_of_all_resamples() -> None:
    """Of the 27 resamples of 0, 1 and 2 means are m/3 with 1 3 6 7 6 3 1 cases: 1/27 lies below each end."""
    low, high = bootstrap_interval([0.0, 1.0, 2.0])
    assert (low, high) == (0.0, 2.0)
    values = np.arange(40.0)
    low, high = bootstrap_interval(values.tolist())
    half = 1.96 * float(values.std()) / math.sqrt(40)
    assert low == pytest.approx(19.5 - half, abs=0.25) and high == pytest.approx(19.5 + half, abs=0.25)
    assert bootstrap_interval(values.tolist()) == (low, high)
    assert bootstrap_interval(values.tolist(), seed=1) != (low, high)
    assert bootstrap_interval([0.25] * 5) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([1.0, 1.0, 1.0], 2 / 8),  # +++ and ---
        ([0.5, 0.5, 0.5, -0.5], 10 / 16),  # sums of 1 or 2 on either side: 4 + 1 of each
        ([3.0, 1.0, -1.0], 6 / 8),  # sums of 5, 3, 3, 1 on either side, and 3 was seen
        ([0.0, 0.0, 0.4], 1.0),  # a difference of 0 has no sign
        ([0.0, 0.0], 1.0),
        ([0.1, 0.2, 0.3, -0.3], 12 / 16),  # sums of 0.1 (4 of them) are nearer than 0.3, whatever its last bit
    ],
)
def test_a_p_value_by_hand(differences: list[float], expected: float) -> None:
    assert sign_flip_p(differences) == pytest.approx(expected)


def test_random_signs_agree_with_all_of_them() -> None:
    """For 20 equal differences the sum is 20 - 2B with a binomial B."""
    differences = [1.0] * 15 + [-1.0] * 5
    tail = sum(math.comb(20, number) for number in range(6)) / 2**20
    assert sign_flip_p(differences) == pytest.approx(2 * tail, abs=0.004)
    assert sign_flip_p([1.0] * 40) == 1 / 20_001


def test_p_values_of_equal_models_are_uniform() -> None:
    generator = np.random.default_rng(3)
    found = [sign_flip_p(generator.normal(size=9).tolist()) for _ in range(400)]
    assert np.mean(np.array(found) <= 0.1) == pytest.approx(0.1, abs=0.05)
