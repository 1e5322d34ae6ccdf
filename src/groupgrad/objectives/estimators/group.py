"""GRPO: the reward less the mean of its group, divided by a standard deviation, or not.

`scale_rewards` chooses the deviation (plus 1e-4): of the `group`, of the whole generation `batch` (arXiv:2508.08221),
or `none` (arXiv:2503.20783). With `multi_objective_aggregation="normalize_then_sum"` (GDPO, arXiv:2601.05242) each
reward function is normalised in its group, and their weighted sum over the generation batch. Rewards of 1, 0, 0 and 1
give 0.866, -0.866, -0.866 and 0.866.

When: the default.

Source: arXiv:2402.03300, section 4.1.2.
"""

from __future__ import annotations

from groupgrad.objectives.estimator import (
    AdvantageOptions,
    Estimate,
    Estimator,
    ScoredGroups,
    about_mean,
    weighted_sum,
)

STD_FLOOR = 1e-4
"""Added to every standard deviation before dividing by it."""


def relative_to_group(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """Deviations from the group's mean, scaled as the options say."""
    if options.aggregation == "normalize_then_sum":
        return _normalize_then_sum(groups)
    about = about_mean(groups.rewards)
    scaled = about.deviations
    if options.scale_rewards == "group":
        scaled = scaled / (about.std + STD_FLOOR)
    elif options.scale_rewards == "batch":
        scaled = scaled / (about_mean(groups.rewards.reshape(1, -1)).std + STD_FLOOR)
    return Estimate(scaled, about.vary)


def _normalize_then_sum(groups: ScoredGroups) -> Estimate:
    """GDPO. A group teaches nothing if no function varies in it."""
    num_groups, size, num_functions = groups.by_function.shape
    functions = about_mean(groups.by_function.permute(2, 0, 1).reshape(-1, size))
    normalized = functions.deviations / (functions.std + STD_FLOOR)
    by_row = normalized.view(num_functions, num_groups * size).T
    batch = about_mean(weighted_sum(by_row, groups.weights).view(1, -1))
    scaled = batch.deviations / (batch.std + STD_FLOOR)
    return Estimate(scaled.view(num_groups, size), functions.vary.view(num_functions, num_groups).any(dim=0))


ESTIMATOR = Estimator(relative_to_group, reads=("scale_rewards", "multi_objective_aggregation"))
