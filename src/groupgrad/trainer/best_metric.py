"""Checks that evaluations will have the metric by which the best model is chosen."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from groupgrad.config import GRPOConfig
from groupgrad.config.field_rules import nearest
from groupgrad.rewards.call_inputs import TRAINER_METRIC_PREFIXES, TRAINER_METRICS
from groupgrad.rewards.reward_runner import RewardRunner

_ALWAYS = (
    *("loss", "reward", "reward_std", "frac_reward_zero_std", "entropy", "num_tokens"),
    *("runtime", "samples_per_second", "steps_per_second"),
    *(f"completions/{kind}_{name}" for kind in ("mean", "min", "max") for name in ("length", "terminated_length")),
    "completions/clipped_ratio",
)
_TRAINING_ALONE = ("grad_norm", "learning_rate", "epoch", "step_time", "num_input_tokens_seen")


def check_best_metric(config: GRPOConfig, evaluation: Any, rewards: RewardRunner, *, is_open: bool) -> None:
    """ValueError if no evaluation can have `metric_for_best_model`; a warning if only a script's own code can log it.

    `is_open`: callbacks, a subclass or a rollout function may log further metrics, as `log_metric` can.
    """
    wanted = config.metric_for_best_model
    if wanted is None or evaluation is None or not config.evaluates:
        return
    full = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
    prefixes = [f"eval_{name}_" for name in evaluation] if isinstance(evaluation, Mapping) else ["eval_"]
    # The name of one set may begin with that of another.
    names = sorted((full.removeprefix(prefix) for prefix in prefixes if full.startswith(prefix)), key=len)
    if not names:
        raise ValueError(
            f"metric_for_best_model={wanted!r} is looked for as {full!r}, but the metrics of a dict of evaluation sets "
            f"begin with {' or '.join(map(repr, prefixes))}; set it to '{prefixes[0]}{full.removeprefix('eval_')}'"
        )
    known = {*_ALWAYS, *(f"rewards/{reward}/{kind}" for reward in rewards.names for kind in ("mean", "std"))}
    if any(name in known or _may_be_measured(name, config) for name in names):
        return
    name = names[0]
    is_reserved = name in TRAINER_METRICS or name.startswith(TRAINER_METRIC_PREFIXES)
    similar = nearest(name, known)
    hint = f"did you mean {similar!r}? " if similar else ""
    if is_reserved or not (is_open or rewards.may_log_metrics):
        raise ValueError(
            f"metric_for_best_model={wanted!r} is no metric of this run's evaluations: {hint}Set it to 'reward', "
            f"'loss' or 'rewards/{rewards.names[0]}/mean', or log it in a reward function by log_metric"
        )
    warnings.warn(
        f"metric_for_best_model={wanted!r} is no metric that the trainer measures: {hint}A run without it ends after "
        "its first evaluation; log it in a reward function by log_metric, or set it to 'reward'"
    )


def _may_be_measured(name: str, config: GRPOConfig) -> bool:
    """True for metrics that depend on the loss, the tools or the model."""
    if name == "kl":
        return config.beta != 0
    if name in TRAINER_METRICS:
        return name not in _TRAINING_ALONE
    return name.startswith(TRAINER_METRIC_PREFIXES) and not name.startswith(("rewards/", "completions/", "time/"))
