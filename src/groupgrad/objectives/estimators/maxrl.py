r"""MaxRL: the reward less the mean of its group, divided by that mean. For rewards of 0 or 1.

$$A_i = \frac{r_i - \bar r}{\bar r}$$

and 0 where the mean is 0. Hard prompts weigh more: the expected gradient is that of the sum of pass@k / k for k below
G, the first terms of the series of the log pass rate.

Worked: `rewards=[1, 0, 0, 0]` gives `[3, -1, -1, -1]`.

When: verified answers, many prompts that are rarely solved, and samples enough to solve them sometimes.

Source: arXiv:2602.02710.
"""

from __future__ import annotations

import torch

from groupgrad.objectives.estimator import AdvantageOptions, Estimate, Estimator, ScoredGroups, about_mean


def relative_to_pass_rate(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """(r - mean) / mean, 0 where the mean is 0. ValueError for rewards other than 0 and 1."""
    rewards = groups.rewards
    if len(groups.weights) == 1:  # whatever the weight of a single function is
        rewards = rewards / groups.weights.abs()
    others = ~(rewards.isnan() | (rewards == 0) | (rewards == 1))
    if bool(others.any()):
        row = int(others.flatten().nonzero()[0])
        raise ValueError(
            f"advantage_estimator='maxrl' is for rewards of 0 or 1, but the sum of row {row} is "
            f"{float(rewards.flatten()[row])}. Have one reward function return 1 for a success and 0 for a failure, "
            "give all others the weight 0 in reward_weights, or use advantage_estimator='group'"
        )
    pass_rate = rewards.nanmean(dim=1, keepdim=True)
    scaled = about_mean(rewards).deviations / pass_rate
    return Estimate(torch.where(pass_rate > 0, scaled, torch.zeros_like(scaled)))


ESTIMATOR = Estimator(relative_to_pass_rate, binary=True)
