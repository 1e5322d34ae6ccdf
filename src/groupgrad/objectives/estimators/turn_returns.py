r"""Turn returns: each turn gets the rewards from it on, relative to the same turn of the group's other completions.

Reward functions and `get_reward` may return a list with one reward a turn; one number for the whole completion counts
at its last turn. With the rewards r of the turns of a completion, the return of its turn t is

$$R_{i,t} = \sum_{s \ge t} \gamma^{s-t} r_{i,s}$$

and the advantage is the deviation from the mean of the returns at turn t, over the completions of the group that have
a turn t, divided as `scale_rewards` says: by the deviation of these returns plus 1e-4 (`group`), that of all returns of
the generation batch (`batch`), or not at all (`none`). A turn that one completion alone has gets 0. With one turn a
completion it is `group`.

Worked: `rewards=[[0, 1], [1, 0]], scale_rewards="none"` gives `[[0, 0.5], [0, -0.5]]`.

When: agents whose turns are scored one by one.

Source: returns as in REINFORCE with a baseline by time (Sutton and Barto, Reinforcement Learning, 13.4), which is the
group here. arXiv:2402.03300, section 4.1.3, sums rewards that were normalised over all steps of the group instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.objectives.estimator import (
    AdvantageOptions,
    Estimate,
    Estimator,
    ScoredGroups,
    about_mean,
    scaled,
)
from groupgrad.objectives.registry import FROM_0_TO_1, setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of turn returns."""

    discount: float = setting(1.0, FROM_0_TO_1, "has no sum over many turns")
    """Factor of a reward for each turn that it comes later."""


def relative_to_same_turn(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """Returns less the mean at the same turn of the group."""
    discount = (options.settings or Settings()).discount
    num_groups, size = groups.rewards.shape
    returns = [turns.returns(discount) for turns in groups.of_turns("turn_returns")]
    longest = max((len(values) for values in returns), default=0)
    lines = torch.full((num_groups * size, longest), torch.nan, dtype=torch.float64)
    for row, values in enumerate(returns):
        lines[row, : len(values)] = values
    by_turn = lines.view(num_groups, size, longest).transpose(1, 2).reshape(num_groups * longest, size)
    found = scaled(about_mean(by_turn), by_turn, options.scale_rewards)
    rows = found.nan_to_num(nan=0.0).view(num_groups, longest, size).transpose(1, 2).reshape(num_groups * size, longest)
    return Estimate.of_turns(groups, [rows[row, : len(values)] for row, values in enumerate(returns)])


ESTIMATOR = Estimator(relative_to_same_turn, reads=("scale_rewards",), settings=Settings, uses_turns=True)
