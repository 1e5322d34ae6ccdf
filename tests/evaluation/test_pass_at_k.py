"""pass@k and the best of k, by hand and over all outcomes of a model of three tokens."""

from __future__ import annotations

import itertools
import math

import pytest

from groupgrad.evaluation.statistics import best_of_k, pass_at_k

LOGITS = {"": (0.3, -0.4, 0.1), "a": (-1.0, 0.5, 0.2), "b": (0.0, 0.7, -0.6)}
"""Logits of the tokens a, b and end after nothing, an a and a b: a model of three tokens that samples two at most."""


def completions() -> dict[str, float]:
    """Every completion of the model, with its probability."""
    found: dict[str, float] = {}

    def grow(text: str, probability: float) -> None:
        weights = [math.exp(logit) for logit in LOGITS[text[-1:]]]
        for token, weight in zip("ab.", weights):
            longer, p = text + token, probability * weight / sum(weights)
            if token == "." or len(longer) == 2:
                found[longer] = p
            else:
                grow(longer, p)

    grow("", 1.0)
    return found


def reward(text: str) -> float:
    """1 for a completion with an a at its end, 0.5 for an immediate end, else 0."""
    return 1.0 if text.endswith(("a", "a.")) else 0.5 if text == "." else 0.0


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs have the right one
        (5, 2, 3, 9 / 10),  # one of the 10 triples has none of the two
        (5, 3, 3, 1.0),
        (5, 0, 5, 0.0),
        (2, 2, 3, math.nan),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=0, rel=1e-15, nan_ok=True)


def test_large_numbers_do_not_overflow() -> None:
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5, rel=1e-12)
    assert best_of_k([0.0] * 4999 + [1.0], 2500) == pytest.approx(0.5, rel=1e-12)


def test_best_of_k_is_the_mean_over_all_subsets() -> None:
    rewards = [0.2, -1.0, 0.7, 0.7, 3.0]
    for k in range(1, 6):
        best = [max(subset) for subset in itertools.combinations(rewards, k)]
        assert best_of_k(rewards, k) == pytest.approx(sum(best) / len(best), rel=1e-14)
    assert math.isnan(best_of_k(rewards, 6))
    assert best_of_k([1.0, 0.0, 0.0, 1.0, 0.0], 3) == pytest.approx(pass_at_k(5, 2, 3), rel=1e-15)


def test_a_model_of_three_tokens_enumerated() -> None:
    """The expectation over all 7^n samples of n completions is the probability that the model itself has."""
    texts = completions()
    assert len(texts) == 7 and sum(texts.values()) == pytest.approx(1.0, rel=1e-15)
    p = math.fsum(value for text, value in texts.items() if reward(text) == 1.0)
    at_most_half = 1 - p
    zero = math.fsum(value for text, value in texts.items() if reward(text) == 0.0)
    n = 4
    for k in (1, 2, 3, 4):
        passed, best = [], []
        for sample in itertools.product(texts, repeat=n):
            probability = math.prod(texts[text] for text in sample)
            rewards = [reward(text) for text in sample]
            passed.append(probability * pass_at_k(n, rewards.count(1.0), k))
            best.append(probability * best_of_k(rewards, k))
        assert math.fsum(passed) == pytest.approx(1 - (1 - p) ** k, rel=1e-13)
        expected = 1.0 * (1 - at_most_half**k) + 0.5 * (at_most_half**k - zero**k)
        assert math.fsum(best) == pytest.approx(expected, rel=1e-13)
