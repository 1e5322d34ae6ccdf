"""Computes advantages from rewards: how much better a completion scored than its group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from groupgrad.metrics import Metric, mean_of
from groupgrad.objectives.estimator import (
    AdvantageOptions,
    Aggregation,
    ScaleRewards,
    ScoredGroups,
    ScoredTurns,
    about_mean,
    numbers_of,
    weighted_sum,
)
from groupgrad.objectives.estimators import find_estimator
from groupgrad.objectives.measure import mean_where
from groupgrad.types import Turns


@dataclass(slots=True)
class Advantages:
    """The advantages of a generation batch, all ranks' rows."""

    advantages: torch.Tensor
    """(N,) float64, free of NaN; 0 for rows that no function scored and groups without two scored rows."""
    combined: torch.Tensor
    """(N,) float64, weighted sum of the rewards given; NaN where no function of non-zero weight scored the row."""
    zero_std: torch.Tensor
    """(N,) bool, the row's group gives no signal: its rewards do not vary, or fewer than two rows were scored."""
    by_turn: list[torch.Tensor] | None = None
    """(T,) float64 of the turns of each row, whose mean over tokens `advantages` has then; None: all turns have the
    row's."""


def compute_advantages(
    rewards: torch.Tensor,
    weights: torch.Tensor | Sequence[float],
    num_generations: int,
    scale_rewards: ScaleRewards = "group",
    aggregation: Aggregation = "sum_then_normalize",
    *,
    estimator: str = "group",
    settings: Any = None,
    lengths: torch.Tensor | None = None,
    turns: Sequence[Turns] | None = None,
) -> Advantages:
    """The advantages of all N rows of a generation batch from (N, R) rewards, rows of a group contiguous.

    NaN is "not scored": it touches neither the row's sum nor any mean or standard deviation. Functions of weight 0 play
    no part, whatever they gave. `estimator` is a name that `find_estimator` knows, with its `settings`; the files of
    `objectives/estimators` have formulas and sources. `scale_rewards` and `aggregation` are read by `group` alone.
    `lengths` (N,) are the tokens that the policy sampled, `turns` the turns of each row; some estimators need them.

    Raises ValueError for unknown names, infinite rewards of non-zero weight, shapes that do not fit, and rewards that
    the estimator is not for.
    """
    options = AdvantageOptions(scale_rewards, aggregation, settings)
    rewards = rewards.detach().double()
    weight = torch.as_tensor(weights, dtype=torch.float64, device=rewards.device)
    fits = rewards.ndim == 2 and weight.shape == rewards.shape[1:] and num_generations > 0
    if not fits or rewards.shape[0] % num_generations:
        raise ValueError(_shape_error(rewards, weight, num_generations))
    counts = weight != 0
    rewards, weight = rewards[:, counts], weight[counts]
    if bool(rewards.isinf().any()):
        raise ValueError(_infinite_error(rewards))
    combined = weighted_sum(rewards, weight)
    shape = (rewards.shape[0] // num_generations, num_generations)
    groups = ScoredGroups(
        combined.view(shape),
        rewards.view(*shape, rewards.shape[1]),
        weight,
        None if lengths is None else lengths.to(rewards).view(shape),
        None if turns is None else [_scored(*pair, counts, weight) for pair in zip(turns, numbers_of(combined))],
    )
    found = find_estimator(estimator).estimate(groups, options)
    has_signal = about_mean(groups.rewards).vary if found.has_signal is None else found.has_signal
    advantages = found.advantages.reshape(-1).nan_to_num(nan=0.0)
    by_turn = found.by_turn
    if by_turn is not None and turns is not None:  # a row that no function scored has no advantage anywhere
        by_turn = [
            values if len(values) else torch.zeros(len(one.lengths), dtype=torch.float64)
            for values, one in zip(by_turn, turns)
        ]
    return Advantages(advantages, combined, (~has_signal).repeat_interleave(num_generations), by_turn)


def _scored(turns: Turns, combined: float, counts: torch.Tensor, weight: torch.Tensor) -> ScoredTurns:
    """The turns of a row with the weighted sum of its rewards; none if it is NaN."""
    num_turns = 0 if math.isnan(combined) else len(turns.lengths)
    rewards = weighted_sum(turns.rewards[:num_turns, counts], weight).nan_to_num(nan=0.0)
    return ScoredTurns(rewards, torch.tensor(turns.lengths[:num_turns], dtype=torch.float64), turns.states)


def reward_metrics(rewards: torch.Tensor, names: Sequence[str], result: Advantages) -> dict[str, Metric]:
    """The reward metrics of a generation batch, from the (N, R) rewards of all ranks; every rank makes the same ones.

    `reward` and `rewards/<name>/mean` are means over scored rows, `reward_std` and `rewards/<name>/std` sample standard
    deviations (ddof 1) over them, averaged over generation batches ("nothing measured" with fewer than two);
    `frac_reward_zero_std` is the share of rows whose group gives no signal.
    """
    spread = reward_spread(rewards, names, result.combined)
    metrics = {
        "reward": _mean(result.combined),
        "reward_std": spread["reward_std"],
        "frac_reward_zero_std": mean_of(result.zero_std.sum(), result.zero_std.numel()),
    }
    for index, name in enumerate(names):
        column = rewards[:, index].detach().double()
        metrics[f"rewards/{name}/mean"] = _mean(column)
        metrics[f"rewards/{name}/std"] = spread[f"rewards/{name}/std"]
    return metrics


def reward_spread(rewards: torch.Tensor, names: Sequence[str], combined: torch.Tensor) -> dict[str, Metric]:
    """`reward_std` and `rewards/<name>/std` over all rows given: (N, R) rewards, and (N,) their weighted sums."""
    columns = {f"rewards/{name}/std": rewards[:, index] for index, name in enumerate(names)}
    lines = {name: column.detach().double().view(1, -1) for name, column in {"reward_std": combined, **columns}.items()}
    return {name: _mean(about_mean(line).std) for name, line in lines.items()}


def _mean(values: torch.Tensor) -> Metric:
    return mean_where(values, ~values.isnan())


def _shape_error(rewards: torch.Tensor, weight: torch.Tensor, num_generations: int) -> str:
    """Says why these rewards have no advantages, and what to give."""
    if rewards.ndim != 2 or weight.shape != rewards.shape[1:]:
        return (
            f"rewards of shape {tuple(rewards.shape)} and weights of shape {tuple(weight.shape)} do not fit; "
            "give one row a completion, one column a reward function and one weight a column"
        )
    return (
        f"{rewards.shape[0]} rows are not whole groups of num_generations={num_generations}; "
        "give all rows of every group, contiguous"
    )


def _infinite_error(rewards: torch.Tensor) -> str:
    row = int(rewards.isinf().any(dim=1).nonzero()[0])
    return (
        f"row {row} has an infinite reward ({[float(value) for value in rewards[row]]}), which leaves its group "
        "without a mean; return a finite number, or None for no reward"
    )
