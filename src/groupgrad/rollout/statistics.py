"""Metrics and log records of finished rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupgrad.metrics import Metric, maximum, mean_of, minimum
from groupgrad.types import RewardTable, Rollout


def completion_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Lengths (tokens the policy sampled) of these rollouts, of the terminated ones, and the share of truncated ones.

    Means carry their counts, so that parts of a round can be merged exactly. Without a terminated row the
    `*_terminated_*` keys are left out.
    """
    lengths = [rollout.num_sampled for rollout in rollouts]
    ended = [rollout.num_sampled for rollout in rollouts if not rollout.is_truncated]
    metrics = {"completions/clipped_ratio": mean_of(len(lengths) - len(ended), len(lengths))}
    for name, values in (("length", lengths), ("terminated_length", ended)):
        metrics[f"completions/mean_{name}"] = mean_of(sum(values), len(values))
        metrics[f"completions/min_{name}"] = minimum(min(values, default=float("nan")))
        metrics[f"completions/max_{name}"] = maximum(max(values, default=float("nan")))
    return metrics


def num_tokens(rollouts: Sequence[Rollout]) -> int:
    """Prompt tokens and sampled completion tokens, each row with its own prompt."""
    return sum(len(rollout.prompt.ids) + rollout.num_sampled for rollout in rollouts)


def log_records(
    rollouts: Sequence[Rollout], table: RewardTable, advantages: Sequence[float], step: int
) -> list[dict[str, Any]]:
    """One record a rollout for the completions table."""
    return [
        {
            "step": step,
            "prompt": rollout.prompt.row["prompt"],
            "completion": rollout.completion,
            **{name: _reward(table, i, r) for r, name in enumerate(table.names)},
            "advantage": advantages[i],
            "finish_reason": rollout.finish_reason,
            "num_tokens": rollout.num_sampled,
            **{column: values[i] for column, values in table.columns.items()},
        }
        for i, rollout in enumerate(rollouts)
    ]


def _reward(table: RewardTable, row: int, function: int) -> float | None:
    value = float(table.rewards[row, function])
    return None if value != value else value
