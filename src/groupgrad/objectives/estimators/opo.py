r"""OPO: the reward less the mean of its group, in which a completion counts by its length.

With lengths l, the tokens that the policy sampled, the advantage is

$$A_i = r_i - \frac{\sum_j l_j r_j}{\sum_j l_j}$$

The baseline has the least variance if the gradients of tokens are independent and of one size.

Worked: `rewards=[1, 0], lengths=[30, 10]` gives `[0.25, -0.75]`.

When: on-policy steps with completions of very different lengths.

Source: arXiv:2505.23585.
"""

from __future__ import annotations

from groupgrad.objectives.estimator import AdvantageOptions, Estimate, Estimator, ScoredGroups, about_mean


def relative_to_tokens(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """Rewards less the length-weighted mean of their group."""
    return Estimate(about_mean(groups.rewards, groups.counted("opo")).deviations)


ESTIMATOR = Estimator(relative_to_tokens)
