r"""GiGPO: the advantage of the episode, plus that of each turn among turns of the group that begin in the same state.

$$A_{i,t} = A^E_i + \omega A^S_{i,t}$$

The first term is that of the completion, its rewards summed, as in `group`. The second compares the discounted returns
(see `turn_returns`) of all turns of the group's completions with the same state, as `scale_rewards` says; a state that
occurs once gives 0. The state of a turn is what the model read since its last turn, or the environment's attribute that
`state` names, as text.

Worked: `rewards=[[0, 1], [0, 0]], scale_rewards="none", discount=0.5` gives `[[0.75, 1], [-0.75, -1]]`.

When: agents that come by the same states again and again, in games or web pages, with a reward at the end.

Source: arXiv:2505.10978, eq. 3, 5, 7 and 8.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from groupgrad.objectives.estimator import (
    AdvantageOptions,
    Estimate,
    Estimator,
    ScoredGroups,
    about_mean,
    numbers_of,
    scaled,
)
from groupgrad.objectives.estimators.group import relative_to_group
from groupgrad.objectives.registry import FROM_0_TO_1, NOT_NEGATIVE, Range, setting

NAME = Range("a name, or None", lambda value: isinstance(value, (str, type(None))))


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of GiGPO."""

    omega: float = setting(1.0, NOT_NEGATIVE, "turns the second term round")
    """Weight of the second term."""
    discount: float = setting(0.95, FROM_0_TO_1, "has no sum over many turns")
    """Factor of a reward for each turn that it comes later."""
    state: str | None = setting(None, NAME, "is no name")
    """Attribute or property of the environment that is its state."""


def episodes_and_states(groups: ScoredGroups, options: AdvantageOptions) -> Estimate:
    """The two terms of each turn."""
    settings = options.settings or Settings()
    turns, size = groups.of_turns("gigpo"), groups.rewards.shape[1]
    episodes = relative_to_group(groups, options).advantages.reshape(-1).nan_to_num(nan=0.0)
    returns = [one.returns(settings.discount) for one in turns]
    every = torch.cat([torch.zeros(0, dtype=torch.float64), *returns])
    by_turn = [episodes[row].expand(len(values)).clone() for row, values in enumerate(returns)]
    for first in range(0, len(turns), size):
        places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for row in range(first, first + size):
            for turn, state in enumerate(turns[row].states[: len(returns[row])]):
                places[state].append((row, turn))
        for met in places.values():
            met_again = torch.stack([returns[row][turn] for row, turn in met]).view(1, -1)
            values = scaled(about_mean(met_again), every, options.scale_rewards).nan_to_num(nan=0.0)
            for (row, turn), value in zip(met, numbers_of(values.flatten())):
                by_turn[row][turn] += settings.omega * value
    return Estimate.of_turns(groups, by_turn)


ESTIMATOR = Estimator(
    episodes_and_states,
    reads=("scale_rewards", "multi_objective_aggregation"),
    settings=Settings,
    uses_turns=True,
    state=lambda settings: settings.state,
)
