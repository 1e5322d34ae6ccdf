"""Metrics and log records of finished rollouts."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any, get_args

from groupgrad.metrics import Metric, maximum, mean_of, minimum
from groupgrad.types import FinishReason, RewardTable, Rollout

_NEXT_TO_NOTHING = sys.float_info.min
"""Weight of a share of nothing: it reads 0, and added to any count it is lost."""
_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


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


def agent_metrics(rollouts: Sequence[Rollout], tools: Collection[str]) -> dict[str, Metric]:
    """What agents did: turns, calls by tool, failures, latencies (seconds a call), waiting (seconds a rollout).

    `tools` are the names of those that exist; other names, which models make up without end, have no metrics.
    `tools/wait_hidden` is the share of the waiting during which the engine worked for other rollouts.
    """
    traces = [rollout.trace for rollout in rollouts if rollout.trace is not None]
    uses = [use for trace in traces for use in trace.tool_uses]
    wait_s, hidden_s = sum(trace.wait_s for trace in traces), sum(trace.hidden_s for trace in traces)
    metrics = {
        "tools/call_frequency": mean_of(len(uses), len(rollouts)),
        "tools/failure_frequency": mean_of(sum(use.failed for use in uses), len(uses) or _NEXT_TO_NOTHING),
        "tools/timeouts": mean_of(sum(use.timed_out for use in uses), len(uses) or _NEXT_TO_NOTHING),
        "tools/wait_s": mean_of(wait_s, len(rollouts)),
        "rollouts/turns": mean_of(sum(trace.num_turns for trace in traces), len(rollouts)),
    }
    if wait_s:
        metrics["tools/wait_hidden"] = mean_of(hidden_s, wait_s)
    for name in dict.fromkeys(use.name for use in uses if use.name in tools):
        mine = [use for use in uses if use.name == name]
        metrics[f"tools/{name}/call_frequency"] = mean_of(len(mine), len(rollouts))
        metrics[f"tools/{name}/failure_frequency"] = mean_of(sum(use.failed for use in mine), len(mine))
        metrics[f"tools/{name}/timeouts"] = mean_of(sum(use.timed_out for use in mine), len(mine))
        metrics[f"tools/{name}/latency_s"] = mean_of(sum(use.seconds for use in mine), len(mine))
    return {**metrics, **ending_metrics(rollouts)}


def ending_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """The share of rollouts that ended for each reason, `rollouts/<reason>`."""
    reasons = [rollout.finish_reason for rollout in rollouts]
    return {f"rollouts/{reason}": mean_of(reasons.count(reason), len(reasons)) for reason in _REASONS}


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
