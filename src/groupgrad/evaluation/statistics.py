"""Statistics of evaluations and runs: pass@k, majority votes, intervals, and tests of differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

DRAWS = 10_000
"""Resamples of a bootstrap interval."""
FLIPS = 20_000
"""Random assignments of signs, where there are too many to try all."""
MOST_ENUMERATED = 14
"""Differences whose 2^n assignments of signs are all tried."""

_CELLS = 1_000_000
"""Numbers that are drawn at a time."""


def pass_at_k(num_sampled: int, num_right: int, k: int) -> float:
    """Estimates the probability that one of k completions is right (arXiv:2107.03374, eq. 1).

    1 - C(n - c, k) / C(n, k), the share of the subsets of k that hold one of the c right completions among n. Over
    independent completions, each right with probability p, its expectation is 1 - (1 - p)^k. NaN if n < k.
    """
    if num_sampled < k:
        return math.nan
    subsets = math.comb(num_sampled, k)
    return (subsets - math.comb(num_sampled - num_right, k)) / subsets


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """Estimates the expected largest reward of k completions: its mean over all subsets of k of these n rewards.

    With the rewards in ascending order, the i-th (from 1) is the largest of C(i - 1, k - 1) of the C(n, k) subsets.
    For rewards of 0 and 1 it is `pass_at_k`. NaN if n < k.
    """
    if len(rewards) < k:
        return math.nan
    subsets = math.comb(len(rewards), k)
    return math.fsum(reward * (math.comb(i, k - 1) / subsets) for i, reward in enumerate(sorted(rewards)))


def majority_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Estimates the probability that the most frequent answer of k completions is right (arXiv:2203.11171).

    It is the mean over all subsets of k of the n completions. Among answers that are equally frequent one is drawn, so
    a tie counts with the share of its answers that are right. A completion without an answer has no vote, and a subset
    without votes is wrong. An answer that is right in only some of its completions counts with their share. NaN if
    n < k.
    """
    if len(answers) < k:
        return math.nan
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, right):
        if answer is not None:
            votes.setdefault(answer, []).append(is_right)
    silent, total = sum(answer is None for answer in answers), 0.0
    for winner, marks in votes.items():
        if any(marks):
            others = [len(other) for answer, other in votes.items() if answer != winner]
            total += sum(marks) / len(marks) * _wins(len(marks), others, silent, k)
    return total / math.comb(len(answers), k)


def _wins(size: int, others: Sequence[int], silent: int, k: int) -> float:
    """Subsets of k in which an answer of `size` completions has the most votes; one with t equals counts 1/(t + 1).

    For each number of votes m of the answer, `ways[t, s]` counts the choices of s completions among the others in which
    t answers have m votes too and none has more.
    """
    total = 0.0
    for m in range(1, min(size, k) + 1):
        rest = k - m
        ways = np.zeros((rest // m + 1, rest + 1), dtype=object)  # Python's integers, which do not overflow
        for s in range(min(silent, rest) + 1):
            ways[0, s] = math.comb(silent, s)
        for other in others:
            before, ways = ways, np.zeros_like(ways)
            for s in range(min(other, m - 1, rest) + 1):
                ways[:, s:] += before[:, : rest + 1 - s] * math.comb(other, s)
            if m <= min(other, rest):
                ways[1:, m:] += before[:-1, : rest + 1 - m] * math.comb(other, m)
        total += math.comb(size, m) * math.fsum(count / (t + 1) for t, count in enumerate(ways[:, rest]))
    return total


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13).

    `values` are one number a prompt, at least one, whose completions resemble each other: prompts are drawn with
    replacement, `DRAWS` times. The same values and seed give the same interval.
    """
    numbers, generator = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    size = len(numbers)
    parts = [numbers[generator.integers(size, size=(count, size))].mean(axis=1) for count in _portions(DRAWS, size)]
    low, high = np.quantile(np.concatenate(parts), [0.025, 0.975])
    return float(low), float(high)


def sign_flip_p(differences: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p-value of the paired permutation test that two models score the same (Fisher, 1935).

    `differences` are one number a prompt. If the models are alike, each difference has either sign with equal
    probability. The p-value is the share of the assignments of signs whose sum is at least as far from 0 as the one
    seen. All of them are tried for up to `MOST_ENUMERATED` differences other than 0; for more, `FLIPS` random ones
    beside the one seen (Phipson and Smyth, 2010, eq. 2), so that p is at least 1 / (FLIPS + 1).
    """
    sizes = np.abs(np.asarray(differences, dtype=np.float64))
    seen = abs(math.fsum(differences)) - 1e-9 * float(sizes.sum())  # sums in another order differ by rounding
    sizes = sizes[sizes > 0]
    if len(sizes) <= MOST_ENUMERATED:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(sizes))))
        return float((np.abs(signs @ sizes) >= seen).mean())
    generator, extreme = np.random.default_rng(seed), 0
    for count in _portions(FLIPS, len(sizes)):
        signs = generator.integers(2, size=(count, len(sizes))) * 2.0 - 1.0
        extreme += int((np.abs(signs @ sizes) >= seen).sum())
    return (extreme + 1) / (FLIPS + 1)


def _portions(number: int, width: int) -> list[int]:
    """Cuts a number of rows of `width` numbers into portions that fit in memory."""
    most = max(1, _CELLS // width)
    return [min(most, number - start) for start in range(0, number, most)]


def student_tail(t: float, freedom: float) -> float:
    """P(T >= t) of Student's distribution (Student, Biometrika 6(1), 1908).

    With T = sqrt(freedom) tan(a), the angle a has a density in proportion to cos(a)^(freedom - 1), which is integrated
    by Simpson's rule.
    """

    def area(low: float, high: float) -> float:
        angles = np.linspace(low, high, 4001)
        heights = np.cos(angles).clip(min=0.0) ** (freedom - 1)
        weights = np.ones_like(angles)
        weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
        return float((heights * weights).sum() * (angles[1] - angles[0]) / 3)

    tail = area(math.atan(abs(t) / math.sqrt(freedom)), math.pi / 2) / (2 * area(0.0, math.pi / 2))
    return tail if t >= 0 else 1 - tail


def student_quantile(tail: float, freedom: float) -> float:
    """The t, 0 or more, with P(T >= t) = `tail`, which is above 0 and at most 0.5."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > tail else (low, middle)
    return high
