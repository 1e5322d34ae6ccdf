"""Unbiased estimates, from the n completions of a prompt, of what the best of k completions would score."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
