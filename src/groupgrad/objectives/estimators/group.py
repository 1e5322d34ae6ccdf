"""GRPO: the reward less the mean of its group, divided by a standard deviation, or not.

`scale_rewards` chooses the deviation (plus 1e-4): of the `group`, of the whole generation `batch` (arXiv:2508.08221),
or `none` (arXiv:2503.20783). With `multi_objective_aggregation="normalize_then_sum"` (GDPO, arXiv:2601.05242) each
reward function is normalised in its group, and their weighted sum over the generation batch.

Worked: `rewards=[1, 0, 0, 1]` gives `[0.866, -0.866, -0.866, 0.866]`.

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
    scaled,
    weighted_sum,
)


def relative_to_group(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """Deviations from the group's mean, scaled as the options say."""
    if options.aggregation == "normalize_then_sum":
        return _normalize_then_sum(groups)
    about = about_mean(groups.rewards)
    return Estimate(scaled(about, groups.rewards, options.scale_rewards), about.vary)


def _normalize_then_sum(groups: ScoredGroups) -> Estimate:
    """GDPO. A group teaches nothing if no function varies in it."""
    num_groups, size, num_functions = groups.by_function.shape
    functions = about_mean(groups.by_function.permute(2, 0, 1).reshape(-1, size))
    normalized = scaled(functions, groups.by_function, "group")
    by_row = normalized.view(num_functions, num_groups * size).T
    batch = about_mean(weighted_sum(by_row, groups.weights).view(1, -1))
    advantages = scaled(batch, by_row, "group")
    return Estimate(advantages.view(num_groups, size), functions.vary.view(num_functions, num_groups).any(dim=0))


ESTIMATOR = Estimator(relative_to_group, reads=("scale_rewards", "multi_objective_aggregation"))
