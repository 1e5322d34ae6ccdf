r"""OPO: the reward less the mean of its group, in which a completion counts by its length.

With lengths l, the tokens that the policy sampled, the advantage is

$$A_i = r_i - \frac{\sum_j l_j r_j}{\sum_j l_j}$$

The baseline has the least variance if the gradients of tokens are independent and of one size.

Worked: `rewards=[1, 0], lengths=[30, 10]` gives `[0.25, -0.75]`.

When: on-policy steps with completions of very different lengths.

Source: arXiv:2505.23585.
"""

from __future__ import annotations

import torch

from groupgrad.objectives.estimator import AdvantageOptions, Estimate, Estimator, ScoredGroups


def relative_to_tokens(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """Rewards less the length-weighted mean of their group."""
    rewards, scored = groups.rewards, ~groups.rewards.isnan()
    lengths = torch.where(scored, groups.counted("opo"), torch.zeros_like(rewards))
    # Measured from a member of the group, so that equal rewards deviate by exactly 0.
    origin = torch.where(scored, rewards, torch.full_like(rewards, torch.inf)).min(dim=1, keepdim=True).values
    distance = torch.where(scored, rewards - origin, torch.zeros_like(rewards))
    total = lengths.sum(dim=1, keepdim=True).clamp(min=1)
    baseline = (lengths * distance).sum(dim=1, keepdim=True) / total
    return Estimate(torch.where(scored, distance - baseline, torch.zeros_like(rewards)))


ESTIMATOR = Estimator(relative_to_tokens)
