r"""pass@k: what a completion adds to the best of k that are drawn from its group.

The advantage is G / C(G, k) times the sum, over all sets of k completions that contain it, of the best reward in the
set less the best reward in it without the completion. The expected gradient is that of the expected best reward of k
samples, without bias; for rewards of 0 and 1 that is pass@k. With rewards in ascending order,

$$A_i = \frac{G}{\binom{G}{k}} \sum_{j<i} (r_i - r_j) \binom{j - 1}{k - 2}$$

`k` = G leaves G (best - second best) for the best row alone, and `k` = 1 is `rloo`. A group with fewer than `k` scored
rows has no set of `k`, and gives 0. verl's `grpo_passk` is the case `k` = G without the factor G, and divided by the
deviation of the group.

Worked: `rewards=[0, 0, 0, 1], k=2` gives `[0, 0, 0, 2]`;
`rewards=[0, 3, 5, 1], k=4` gives `[0, 0, 8, 0]`.

When: several attempts count as one, in search or with a verifier, and diversity must last.

Source: arXiv:2505.15201, eq. 33 (leave-one-out minus one); `k` = G: arXiv:2503.19595.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import torch

from groupgrad.objectives.estimator import AdvantageOptions, Estimate, Estimator, ScoredGroups
from groupgrad.objectives.estimators.rloo import leave_one_out
from groupgrad.objectives.registry import Range, setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of pass@k."""

    k: int = setting(4, Range("1 or more", lambda value: value >= 1), "is no number of samples")
    """Samples of which the best counts."""


def added_to_the_best(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """Advantages of pass@k. A group with fewer than k scored rows has no set of k, and gives 0."""
    k = (options.settings or Settings()).k
    if k == 1:
        return Estimate(leave_one_out(groups.rewards))
    advantages = torch.zeros_like(groups.rewards)
    for group, rewards in enumerate(groups.rewards):
        scored = (~rewards.isnan()).nonzero().flatten()
        values, order = rewards[scored].sort(stable=True)
        distance = values[:, None] - values[None, :]
        weights = torch.tensor(_weights(len(scored), k), dtype=values.dtype, device=values.device)
        advantages[group, scored[order]] = (distance.tril() * weights).sum(dim=1)
    return Estimate(advantages, (advantages != 0).any(dim=1))


@lru_cache(maxsize=64)
def _weights(size: int, k: int) -> tuple[float, ...]:
    """The weight of the distance to the j-th lowest reward, j = 1, 2, ...; binomials are exact as integers."""
    return tuple(size * comb(j, k - 2) / comb(size, k) if size >= k else 0.0 for j in range(size))


ESTIMATOR = Estimator(added_to_the_best, settings=Settings, smallest_group=lambda settings: max(2, settings.k))
