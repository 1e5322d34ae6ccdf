"""Computes advantages from rewards: how much better a completion scored than its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from groupgrad.metrics import Metric, mean_of
from groupgrad.objectives.options import one_of

ScaleRewards = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

STD_FLOOR = 1e-4
"""Added to every standard deviation before dividing by it."""
ZERO_STD = 1e-8
"""A standard deviation up to this is none."""


@dataclass(slots=True)
class Advantages:
    """The advantages of a generation batch, all ranks' rows."""

    advantages: torch.Tensor
    """(N,) float64, free of NaN; 0 for rows that no function scored and groups without two scored rows."""
    combined: torch.Tensor
    """(N,) float64, weighted sum of the rewards given; NaN where no function of non-zero weight scored the row."""
    zero_std: torch.Tensor
    """(N,) bool, the row's group gives no signal: its rewards do not vary, or fewer than two rows were scored."""


@dataclass(slots=True, frozen=True)
class _Deviations:
    """Scores about the mean of their set (a group, or the whole batch); NaN is "not scored"."""

    deviations: torch.Tensor
    """(sets, members), NaN where not scored."""
    std: torch.Tensor
    """(sets, 1) sample standard deviation (ddof 1) of the scored members; NaN for fewer than two."""


def compute_advantages(
    rewards: torch.Tensor,
    weights: torch.Tensor | Sequence[float],
    num_generations: int,
    scale_rewards: ScaleRewards = "group",
    aggregation: Aggregation = "sum_then_normalize",
) -> Advantages:
    """The advantages of all N rows of a generation batch from (N, R) rewards, rows of a group contiguous.

    NaN is "not scored": it touches neither the row's sum nor any mean or standard deviation. Functions of weight 0 play
    no part, whatever they gave.

    `sum_then_normalize`: the weighted sum less its group's mean, divided by the sample standard deviation (of the
    `group`, of the whole `batch`, or not at all) plus 1e-4. arXiv:2402.03300, section 4.1.2; no scaling:
    arXiv:2503.20783; batch scaling: arXiv:2508.08221. `normalize_then_sum` (GDPO): each function is normalised in its
    group first, their weighted sum then over the batch; `scale_rewards` plays no part in it, and a group gives no
    signal if no function varies in it.

    Raises ValueError for unknown names, infinite rewards of non-zero weight, and shapes that do not fit.
    """
    one_of("scale_rewards", scale_rewards, get_args(ScaleRewards))
    one_of("multi_objective_aggregation", aggregation, get_args(Aggregation))
    rewards = rewards.detach().double()
    weight = torch.as_tensor(weights, dtype=torch.float64, device=rewards.device)
    fits = rewards.ndim == 2 and weight.shape == rewards.shape[1:] and num_generations > 0
    if not fits or rewards.shape[0] % num_generations:
        raise ValueError(_shape_error(rewards, weight, num_generations))
    rewards, weight = rewards[:, weight != 0], weight[weight != 0]
    if bool(rewards.isinf().any()):
        raise ValueError(_infinite_error(rewards))
    combined = _weighted_sum(rewards, weight)
    if aggregation == "normalize_then_sum":
        scaled, flat = _normalize_then_sum(rewards, weight, num_generations)
    else:
        groups = _about_mean(combined.view(-1, num_generations))
        scaled, flat = groups.deviations, ~(groups.std > ZERO_STD).squeeze(1)
        if scale_rewards == "group":
            scaled = scaled / (groups.std + STD_FLOOR)
        elif scale_rewards == "batch":
            scaled = scaled / (_about_mean(combined.view(1, -1)).std + STD_FLOOR)
    advantages = scaled.reshape(-1).nan_to_num(nan=0.0)
    return Advantages(advantages, combined, flat.repeat_interleave(num_generations))


def _normalize_then_sum(
    rewards: torch.Tensor, weight: torch.Tensor, num_generations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, N) advantages of GDPO, and (groups,) bool: groups in which no function varies."""
    num_rows, num_functions = rewards.shape
    functions = _about_mean(rewards.T.reshape(-1, num_generations))
    normalized = functions.deviations / (functions.std + STD_FLOOR)
    batch = _about_mean(_weighted_sum(normalized.view(num_functions, num_rows).T, weight).view(1, -1))
    varies = (functions.std > ZERO_STD).view(num_functions, num_rows // num_generations)
    return batch.deviations / (batch.std + STD_FLOOR), ~varies.any(dim=0)


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
    return {name: _mean(_about_mean(line).std) for name, line in lines.items()}


def _weighted_sum(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(N,) weighted sum over the columns of (N, R) that are not NaN; NaN where all of them are."""
    total = (values.nan_to_num(nan=0.0) * weight).sum(dim=1)
    return torch.where(values.isnan().all(dim=1), torch.full_like(total, torch.nan), total)


def _about_mean(values: torch.Tensor) -> _Deviations:
    """Deviations and standard deviation of each line of (sets, members), NaN left out."""
    scored = ~values.isnan()
    count = scored.sum(dim=1, keepdim=True)
    if values.shape[1] == 0:
        return _Deviations(values, torch.full_like(values[:, :1], torch.nan))
    # Measured from a member of the set, so that equal rewards deviate by exactly 0, however large they are.
    origin = torch.where(scored, values, torch.full_like(values, torch.inf)).min(dim=1, keepdim=True).values
    distance = torch.where(scored, values - origin, torch.zeros_like(values))
    deviations = values - origin - distance.sum(dim=1, keepdim=True) / count
    square = torch.where(scored, deviations, torch.zeros_like(values)).square().sum(dim=1, keepdim=True)
    variance = square / (count - 1).clamp(min=1)
    return _Deviations(deviations, torch.where(count >= 2, variance.sqrt(), torch.full_like(variance, torch.nan)))


def _mean(values: torch.Tensor) -> Metric:
    scored = ~values.isnan()
    return mean_of(torch.where(scored, values, torch.zeros_like(values)).sum(), scored.sum())


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
