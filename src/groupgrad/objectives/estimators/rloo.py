"""RLOO: the reward less the mean reward of the other completions of its group.

It is `group` with `scale_rewards="none"` times G / (G - 1), and an unbiased estimate of the gradient of the expected
reward.

Worked: `rewards=[1, 0, 0, 0]` gives `[1, -0.333, -0.333, -0.333]`.

When: small groups, whose own mean would shrink every advantage.

Source: arXiv:2402.14740.
"""

from __future__ import annotations

import torch

from groupgrad.objectives.estimator import AdvantageOptions, Estimate, Estimator, ScoredGroups, about_mean


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """(groups, G) rewards less the mean of the others that were scored; NaN where there are none."""
    count = (~rewards.isnan()).sum(dim=1, keepdim=True)
    return about_mean(rewards).deviations * count / (count - 1)


def relative_to_others(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """Rewards less the mean of the others."""
    return Estimate(leave_one_out(groups.rewards))


ESTIMATOR = Estimator(relative_to_others)
