"""Findings of a check, and advice: warnings derived from a run's metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "error"]

WINDOW = 20
"""Last log events of training that an advice is about; a quarter of them, but at least 3, in a shorter run."""


@dataclass(slots=True, frozen=True)
class Finding:
    """One result of a check."""

    topic: str
    text: str
    """The observation, with its numbers."""
    status: Status = "ok"
    setting: str = ""
    """The change that mends it, by the names of settings."""


@dataclass(slots=True, frozen=True)
class Advice:
    """Something in a run's numbers that calls for a change."""

    text: str
    setting: str
    """The change that mends it, by the names of settings."""
    metric: str
    """The metric that shows it."""


@dataclass(slots=True, frozen=True)
class Numbers:
    """Metrics of a run's training."""

    lines: Sequence[Mapping[str, Any]]

    def values(self, key: str) -> list[float]:
        """All finite values of a metric."""
        values = [float(line[key]) for line in self.lines if isinstance(line.get(key), (int, float))]
        return [value for value in values if math.isfinite(value)]

    def recent(self, key: str) -> float | None:
        """The mean of the last values; None without any."""
        values = self.values(key)
        return statistics.mean(values[-min(WINDOW, max(3, len(values) // 4)) :]) if values else None

    def early(self, key: str) -> float | None:
        """The mean of the first values; None before there are others."""
        values = self.values(key)
        return statistics.mean(values[:WINDOW]) if len(values) >= 2 * WINDOW else None


def advice(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns warnings about a run's metrics as plain dicts; empty if there are none."""
    numbers = Numbers([line for line in lines if "loss" in line])
    return [asdict(found) for check in _CHECKS if (found := check(numbers)) is not None]


def advice_on_step(metrics: Mapping[str, Any]) -> dict[str, Advice]:
    """Returns warnings about the metrics of one step, each by the metric that shows it."""
    numbers = Numbers([metrics])
    return {found.metric: found for check in _CHECKS if (found := check(numbers)) is not None}


def _no_variance(numbers: Numbers) -> Advice | None:
    share = numbers.recent("frac_reward_zero_std")
    if share is None or share < 0.5:
        return None
    reward, before = numbers.recent("reward"), numbers.early("reward")
    why = "the task is too easy or too hard at this length"
    if reward is not None and before is not None and reward > before:
        why = "most prompts are always or never solved by now"
    return Advice(
        f"{share * 100:.0f} % of groups have no variance, so their completions teach nothing: {why}.",
        "Leave out prompts that are always or never solved, raise num_generations or temperature, give partial "
        "rewards, or set dynamic_sampling_rounds, which draws other prompts in their place.",
        "frac_reward_zero_std",
    )


def _entropy(numbers: Numbers) -> Advice | None:
    entropy, before = numbers.recent("entropy"), numbers.early("entropy")
    if entropy is None or before is None:
        return None
    change = f"from {before:.2g} to {entropy:.2g} nats a token"
    if entropy <= 0.2 * before:
        return Advice(
            f"Entropy has fallen {change}: completions of a prompt become alike.",
            "Raise epsilon_high (0.28, as in DAPO) or entropy_coef, or lower learning_rate.",
            "entropy",
        )
    if entropy < max(2 * before, 1.0):
        return None
    return Advice(
        f"Entropy has grown {change}: the policy drifts towards noise.",
        "Lower learning_rate, entropy_coef or temperature, or set beta above 0.",
        "entropy",
    )


def _spikes(numbers: Numbers) -> Advice | None:
    # Steps without a gradient, of groups without variance, say nothing of what is usual.
    norms = [norm for norm in numbers.values("grad_norm")[-5 * WINDOW :] if norm > 0]
    if len(norms) < WINDOW or max(norms) < 20 * statistics.median(norms):
        return None
    return Advice(
        f"The gradient norm jumps to {max(norms):.3g}, {max(norms) / statistics.median(norms):.0f} times its median.",
        "Lower max_grad_norm or learning_rate; look at the rollouts of those steps.",
        "grad_norm",
    )


def _nonfinite(numbers: Numbers) -> Advice | None:
    count = (numbers.values("nonfinite_steps") or [0])[-1]
    if not count:
        return None
    return Advice(
        f"{count:.0f} steps were skipped, since their loss or gradient was not finite.",
        "The warnings name term, token and row. Lower learning_rate or max_grad_norm, or use bf16 in place of fp16.",
        "nonfinite_steps",
    )


def _slow_rewards(numbers: Numbers) -> Advice | None:
    seconds, step = numbers.recent("time/rewards"), numbers.recent("step_time")
    if not seconds or not step or seconds < 0.3 * step:
        return None
    return Advice(
        f"Rewards take {100 * seconds / step:.0f} % of the time of a step.",
        "Make slow reward functions async, so that they overlap; their seconds are with each rollout.",
        "time/rewards",
    )


def _above(metric: str, bound: float, text: str, setting: str) -> Callable[[Numbers], Advice | None]:
    """A check that advises from a recent mean of `bound` on; `text` shows it as `{value}` or `{percent}`."""

    def check(numbers: Numbers) -> Advice | None:
        value = numbers.recent(metric)
        if value is None or value < bound:
            return None
        return Advice(text.format(value=value, percent=100 * value), setting, metric)

    return check


_CHECKS: tuple[Callable[[Numbers], Advice | None], ...] = (
    _nonfinite,
    _no_variance,
    _above(
        "completions/clipped_ratio",
        0.25,
        "{percent:.0f} % of completions are truncated, so their rewards are of unfinished answers.",
        "Raise max_completion_length, reward short answers, or set mask_truncated_completions=True.",
    ),
    _entropy,
    _above(
        "clip_ratio/region_mean",
        0.2,
        "{percent:.0f} % of tokens are outside the trust region, so later steps on a batch teach little.",
        "Lower num_iterations, steps_per_generation or learning_rate.",
    ),
    _spikes,
    _above(
        "sampling/sampling_logp_difference/mean",
        0.05,
        "Sampler and trainer differ by {value:.2g} nats a token on average.",
        "Use the same precision in both, rollout_ahead=0, or vllm_importance_sampling_mode='token_truncate'.",
    ),
    _above(
        "tools/failure_frequency",
        0.3,
        "{percent:.0f} % of tool calls fail.",
        "Read the replies of failed calls among the rollouts; raise tool_timeout_s where they ran out of time.",
    ),
    _slow_rewards,
)
