r"""REINFORCE++-baseline: the reward less the mean of its group, normalised over the tokens of the generation batch.

With d the deviation from the group's mean, which each token of a completion has, and mean and sample variance of d over
all tokens that the policy sampled, the advantage is

$$A_i = \frac{d_i - mean(d)}{\sqrt{var(d) + 10^{-8}}}$$

A group whose rewards are equal gets the shift alone.

Worked: `rewards=[1, 0], lengths=[3, 1]` gives `[0.5, -1.5]`.

When: one scale for all prompts, where the deviation of a single group is a poor estimate.

Source: arXiv:2501.03262; over tokens as in OpenRLHF and verl, with the sample variance of verl.
"""

from __future__ import annotations

import torch

from groupgrad.objectives.estimator import AdvantageOptions, Estimate, Estimator, ScoredGroups, about_mean

VARIANCE_FLOOR = 1e-8
"""Added to the variance before its root is taken."""


def whitened(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """Deviations from the group's mean, normalised over tokens. A group whose rewards are equal gets the shift."""
    about = about_mean(groups.rewards)
    scored = ~groups.rewards.isnan()
    lengths = torch.where(scored, groups.counted("reinforce_plus_plus_baseline"), torch.zeros_like(about.deviations))
    deviations = about.deviations.nan_to_num(nan=0.0)
    count = lengths.sum()
    centred = deviations - (lengths * deviations).sum() / count.clamp(min=1)
    variance = (lengths * centred.square()).sum() / (count - 1).clamp(min=1)
    scaled = centred / (variance + VARIANCE_FLOOR).sqrt()
    return Estimate(torch.where(scored, scaled, torch.zeros_like(scaled)))


ESTIMATOR = Estimator(whitened)
