"""The metric by which the best model is chosen: checks that evaluations will have it, and looks it up."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from transformers import TrainerCallback

from groupgrad import dist
from groupgrad.config import GRPOConfig
from groupgrad.objectives import LOSSES
from groupgrad.rewards.call_inputs import TRAINER_METRIC_PREFIXES, TRAINER_METRICS
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout.sources import RolloutComponents
from groupgrad.spelling import did_you_mean
from groupgrad.types import FinishReason

logger = logging.getLogger(__name__)

_ALWAYS = (
    *("loss", "reward", "reward_std", "frac_reward_zero_std", "entropy", "num_tokens"),
    *("runtime", "samples_per_second", "steps_per_second"),
    *(f"completions/{kind}_{name}" for kind in ("mean", "min", "max") for name in ("length", "terminated_length")),
    "completions/clipped_ratio",
)
_OF_CALLS = ("call_frequency", "failure_frequency", "timeouts")
_OF_VLLM = (
    *("sampling/frac_dropped_rows", "sampling/frac_dropped_tokens"),
    *(f"sampling/sampling_logp_difference/{kind}" for kind in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{kind}" for kind in ("min", "mean", "max")),
)


def check_best_metric(
    config: GRPOConfig, evaluation: Any, rewards: RewardRunner, rollouts: RolloutComponents, *, is_open: bool
) -> None:
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
    metric_names = {*_ALWAYS, *(f"rewards/{reward}/{kind}" for reward in rewards.names for kind in ("mean", "std"))}
    metric_names |= {*_of_objective(config), *_of_rollouts(rollouts)}
    if not metric_names.isdisjoint(names):
        return
    name = names[0]
    is_reserved = name in TRAINER_METRICS or name.startswith(TRAINER_METRIC_PREFIXES)
    hint = did_you_mean(name, metric_names, after=" ")
    if is_reserved or not (is_open or rewards.may_log_metrics):
        raise ValueError(
            f"metric_for_best_model={wanted!r} is no metric of this run's evaluations: {hint}Set it to 'reward', "
            f"'loss' or 'rewards/{rewards.names[0]}/mean', or log it in a reward function by log_metric"
        )
    warnings.warn(
        f"metric_for_best_model={wanted!r} is no metric that the trainer measures: {hint}An evaluation "
        "without it is no better than another; log it in a reward function by log_metric, or set it to 'reward'"
    )


def may_add_metrics(callbacks: Sequence[Any] | None) -> bool:
    """True if one of a script's callbacks gets the metrics of an evaluation, which it may add to."""
    kinds = [callback if isinstance(callback, type) else type(callback) for callback in callbacks or ()]
    from_script = [kind for kind in kinds if not kind.__module__.startswith("transformers.")]
    return any(getattr(kind, "on_evaluate", None) is not TrainerCallback.on_evaluate for kind in from_script)


class BestMetric:
    """Looks the metric up by which the best model is chosen, or a schedule is steered."""

    def __init__(self) -> None:
        self._told = False

    def value(self, config: GRPOConfig, metrics: Mapping[str, float], step: int) -> float | None:
        """The metric's value in an evaluation; None, with one warning a run, if nothing was measured for it."""
        wanted = str(config.metric_for_best_model)
        value = metrics.get(wanted if wanted.startswith("eval_") else f"eval_{wanted}")
        if value is None and not self._told:
            self._told = True
            if dist.is_main():
                logger.warning(
                    "step %d: the evaluation measured nothing for metric_for_best_model=%r, as where no row gives a "
                    "loss or a function did not log it; it counts as not better than others. It has %s",
                    step,
                    config.metric_for_best_model,
                    ", ".join(sorted(metrics)),
                )
        return value


def _of_objective(config: GRPOConfig) -> list[str]:
    """Names of the metrics that this loss and its further terms have."""
    names = [*LOSSES[config.loss_type].metrics, "policy_loss", "aux_loss"]
    return names + ["kl"] * (config.beta != 0) + list(_OF_VLLM) * config.use_vllm


def _of_rollouts(rollouts: RolloutComponents) -> list[str]:
    """Names of the metrics of rollouts that tools, environments or a rollout function make."""
    if rollouts.chat is None and rollouts.function is None:
        return []
    names = [f"rollouts/{reason}" for reason in get_args(FinishReason)]
    if rollouts.chat is None:
        return names
    schemas = rollouts.environments.schemas if rollouts.environments is not None else {}
    tools = {tool.name for tool in rollouts.tools}
    tools |= {schema["function"]["name"] for of_environment in schemas.values() for schema in of_environment}
    names += ["tools/wait_s", "tools/wait_hidden"]
    if tools:
        names += ["rollouts/turns", *(f"tools/{kind}" for kind in _OF_CALLS)]
    return names + [f"tools/{tool}/{kind}" for tool in sorted(tools) for kind in (*_OF_CALLS, "latency_s")]
