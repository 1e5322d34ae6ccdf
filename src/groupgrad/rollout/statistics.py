"""Metrics of finished rollouts."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from groupgrad.metrics import Metric, maximum, mean_of, minimum
from groupgrad.types import FinishReason, Rollout, ToolUse

_NEXT_TO_NOTHING = sys.float_info.min
"""Weight of the failure share of no calls: the metric reads 0, and the weight vanishes beside any count."""


def completion_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Lengths (tokens the policy sampled) of these rollouts, of the terminated ones, and the share of truncated ones.

    Means carry their counts, so that parts of a generation batch can be merged exactly. Without a terminated row the
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


def lag_metrics(rollouts: Sequence[Rollout], step: int) -> dict[str, Metric]:
    """Age of the weights that sampled the tokens, in optimizer steps at `step`: the maximum and the mean over tokens.

    `sampling/frac_mixed_rows` is the share of rows whose tokens were sampled by weights of several steps.
    """
    lags = [
        step - version
        for rollout in rollouts
        for version, is_sampled in zip(
            rollout.policy_versions or [rollout.policy_version] * len(rollout.completion_ids),
            rollout.sampled or [True] * len(rollout.completion_ids),
        )
        if is_sampled
    ]
    num_mixed = sum(rollout.policy_versions is not None for rollout in rollouts)
    return {
        "sampling/policy_lag": maximum(float(step - min(rollout.policy_version for rollout in rollouts))),
        "sampling/policy_lag_mean": mean_of(float(sum(lags)), len(lags)),
        "sampling/frac_mixed_rows": mean_of(num_mixed, len(rollouts)),
    }


def agent_metrics(
    rollouts: Sequence[Rollout], tools: Collection[str], reasons: Sequence[FinishReason]
) -> dict[str, Metric]:
    """Metrics of agents: turns, tool calls, failures, latencies, waiting times, and the `reasons` for which they end.

    Latencies are in seconds per call, waiting times in seconds per rollout. `tools` are the names of existing tools;
    names that a model invents have no metrics. Without tools there are no metrics of calls and turns. `tools/wait_s` is
    the time spent waiting for tools and environments, `tools/wait_hidden` the share of it during which the engine
    worked for other rollouts.
    """
    traces = [rollout.trace for rollout in rollouts if rollout.trace is not None]
    uses = [use for trace in traces for use in trace.tool_uses]
    wait_s, hidden_s = sum(trace.wait_s for trace in traces), sum(trace.hidden_s for trace in traces)
    metrics = {**ending_metrics(rollouts, reasons), "tools/wait_s": mean_of(wait_s, len(rollouts))}
    if tools:
        metrics |= _call_metrics("tools", uses, len(rollouts))
        metrics["rollouts/turns"] = mean_of(sum(trace.num_turns for trace in traces), len(rollouts))
    if wait_s:
        metrics["tools/wait_hidden"] = mean_of(hidden_s, wait_s)
    for name in dict.fromkeys(use.name for use in uses if use.name in tools):
        of_tool = [use for use in uses if use.name == name]
        metrics |= _call_metrics(f"tools/{name}", of_tool, len(rollouts))
        metrics[f"tools/{name}/latency_s"] = mean_of(sum(use.seconds for use in of_tool), len(of_tool))
    return metrics


def _call_metrics(prefix: str, uses: Sequence[ToolUse], num_rollouts: int) -> dict[str, Metric]:
    return {
        f"{prefix}/call_frequency": mean_of(len(uses), num_rollouts),
        f"{prefix}/failure_frequency": mean_of(sum(use.failed for use in uses), len(uses) or _NEXT_TO_NOTHING),
        f"{prefix}/timeouts": mean_of(sum(use.timed_out for use in uses), len(uses) or _NEXT_TO_NOTHING),
    }


def ending_metrics(rollouts: Sequence[Rollout], reasons: Sequence[FinishReason]) -> dict[str, Metric]:
    """The share of rollouts that ended for each of the possible `reasons`, `rollouts/<reason>`."""
    ended = [rollout.finish_reason for rollout in rollouts]
    return {f"rollouts/{reason}": mean_of(ended.count(reason), len(ended)) for reason in reasons}


def num_tokens(rollouts: Sequence[Rollout]) -> int:
    """Prompt tokens and sampled completion tokens, each row with its own prompt and each branch with its context."""
    contexts = sum(len(branch.context) for rollout in rollouts for branch in rollout.branches)
    return contexts + sum(len(rollout.prompt.ids) + rollout.num_sampled for rollout in rollouts)
