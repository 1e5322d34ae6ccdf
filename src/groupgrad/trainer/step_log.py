"""The numbers of an optimizer step: its log, and the watches that read them and warn.

`StepLog` collects the rollouts, losses and durations of a step. `FirstBatch` judges the completions of a run's first
step, `LearningSignalWatch` notices that nothing is learned, `MismatchWatch` that sampling and training differ, and
`BestMetric` that an evaluation did not measure what chooses the best model. None changes a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from groupgrad import dist
from groupgrad.activity import Timings
from groupgrad.errors import NoSignalError
from groupgrad.metrics import Metric, average, merge_all
from groupgrad.objectives import FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS, PolicyLoss
from groupgrad.rollout.collector import Experience
from groupgrad.run_folder.advice import Finding, Status, advice_on_step
from groupgrad.run_folder.metric_store import MetricStore
from groupgrad.scoring.rounding import Rounding
from groupgrad.trainer.sampler_logprobs import MISMATCH

logger = logging.getLogger(__name__)

_PHASES = ("sampling", "rewards", "scoring", "training")
"""Parts of a step whose seconds are logged as `time/...`; they do not overlap, and `step_time` is about their sum."""
_READ_BY_CONTROLLERS = ("entropy", MISMATCH, FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS)


@dataclass
class StepLog:
    """Rollouts, losses and durations of the present step; logged when it has ended."""

    experiences: list[Experience] = field(default_factory=list)
    """Generation batches that the step has sampled."""
    losses: list[PolicyLoss] = field(default_factory=list)
    """Losses and metrics of the parts of its micro-batches, detached; they may still be computed on the device."""
    seconds: float = 0.0
    """Time of its micro-batches."""
    sampling_s: float = 0.0
    """Time of sampling; known when the step has ended."""
    measured: dict[str, Metric] = field(default_factory=dict)
    """Metrics of the losses that controllers and watches read; known when the step has ended."""

    def finish(self, timings: Timings, *, has_weights: bool) -> dict[str, Metric]:
        """Ends the step; `step_time` and `time/...` (seconds), with the time of sending weights if `has_weights`."""
        seconds = timings.take()
        self.sampling_s = seconds.get("sampling", 0.0)
        self.measured = merge_all(
            {key: loss.metrics[key] for key in _READ_BY_CONTROLLERS if key in loss.metrics} for loss in self.losses
        )
        phases = (*_PHASES, "weights") if has_weights else _PHASES
        times = {f"time/{phase}": average(seconds.get(phase, 0.0)) for phase in phases}
        return {"step_time": average(self.seconds), **times}


class StepWatches(TrainerCallback):
    """Passes the numbers of each finished step to the progress bar and to the watches that warn."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Passes on rewards, lengths, speed and mismatch of the step."""
        trainer, step = self._trainer, self._trainer._step_log
        trainer.mismatch_watch.end_step(state.global_step, step.measured)
        for experience in step.experiences:
            trainer.progress.set_numbers(reward=experience.mean_reward)
        lengths = [rollout.num_sampled for experience in step.experiences for rollout in experience.rollouts]
        if lengths:
            # Over all ranks, estimated from this one.
            speed = sum(lengths) * dist.world_size() / max(step.sampling_s, 1e-9)
            trainer.progress.set_numbers(length=sum(lengths) / len(lengths), tokens_per_second=speed)


LEAST_GROUPS = 4
"""Groups of a generation batch from which training warns of equal rewards; fewer often are equal by chance."""

TRUNCATED, NO_VARIANCE = "completions/clipped_ratio", "frac_reward_zero_std"


def ending(trainer: Any, metrics: Mapping[str, Any]) -> Finding:
    """Returns a finding about the share of truncated completions and the lengths of all."""
    advised = advice_on_step(metrics).get(TRUNCATED)
    truncated, longest = float(metrics[TRUNCATED]), float(metrics["completions/max_length"])
    lengths = f"they are {metrics['completions/min_length']:,.0f} to {longest:,.0f} tokens long"
    if advised is None:
        others = ", the others were truncated" if truncated else ""
        return Finding("ended", f"{percent(1 - truncated)} of completions ended by themselves{others}; {lengths}")
    status: Status = "error" if truncated == 1 else "warning"
    share = "all" if truncated == 1 else f"{percent(truncated)} of"
    masked = trainer.args.mask_truncated_completions
    follows = "they teach nothing (mask_truncated_completions=True)" if masked else "unfinished answers are rewarded"
    seen = f"{share} completions were truncated, so {follows}; {lengths}."
    mend = "Raise it, or reward short answers." if masked else advised.setting
    return Finding("ended", seen, status, f"max_completion_length is {trainer.args.max_completion_length:,}. {mend}")


def variance(metrics: Mapping[str, Any]) -> Finding:
    """Returns a finding about the share of groups whose rewards differ."""
    advised = advice_on_step(metrics).get(NO_VARIANCE)
    if advised is None:
        return Finding("variance", f"{percent(1 - float(metrics[NO_VARIANCE]))} of groups have rewards that differ")
    return Finding("variance", advised.text, "warning", advised.setting)


class FirstBatch(TrainerCallback):
    """Warns, after the first optimizer step of a run, of what is wrong with its completions and rewards."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective in the first step: merges its metrics over all ranks. The main process warns."""
        if state.global_step != 1:
            return
        store = MetricStore()
        for experience in self._trainer._step_log.experiences:
            store.add(experience.metrics)
        metrics = store.flush()
        has_rewards = math.isfinite(metrics.get("reward", math.nan))  # without any there is a warning of its own
        if not state.is_world_process_zero or not has_rewards:
            return
        found = [ending(self._trainer, metrics)] if TRUNCATED in metrics else []
        if NO_VARIANCE in metrics and self._trainer.plan.prompts_per_generation >= LEAST_GROUPS:
            found.append(variance(metrics))
        for finding in found:
            if finding.status != "ok":
                logger.warning("step 1: %s %s", finding.text, finding.setting)


PATIENCE = 10
"""Generation batches in a row without a signal after which a warning is due."""


class LearningSignalWatch(TrainerCallback):
    """Counts generation batches in a row that have no group whose rewards differ, and warns once of `PATIENCE` of them.

    With `stop_without_signal` it ends a new run whose first ones are all so: NoSignalError.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_left = self._num_in_row = 0
        self._has_warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts the batches of a new run; a resumed one is past its beginning."""
        self._num_left = args.stop_without_signal if state.global_step == 0 else 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective, with `stop_without_signal`, until a group of any rank has a signal. Raises on all ranks."""
        experiences = self._trainer._step_log.experiences
        shares = [experience.metrics[NO_VARIANCE].read() for experience in experiences]
        signals = [share is not None and share < 1 for share in shares]
        for has_signal in signals:
            self._num_in_row = 0 if has_signal else self._num_in_row + 1
        if self._num_in_row >= PATIENCE and not self._has_warned and state.is_world_process_zero:
            self._has_warned = True
            logger.warning(
                "in the last %d generation batches the rewards of each group were equal, or missing, so they taught "
                "nothing. End the run if the task is learned; otherwise choose tasks that are sometimes solved, give "
                "partial rewards, or raise num_generations or temperature",
                self._num_in_row,
            )
        if self._num_left <= 0 or not experiences:
            return
        if any(dist.all_gather_objects(any(signals))):
            self._num_left = 0
            return
        self._num_left -= len(experiences)
        if self._num_left <= 0:
            raise NoSignalError(
                f"stop_without_signal={args.stop_without_signal}: in the first {args.stop_without_signal} generation "
                "batches the rewards of each group were equal, or missing, so nothing was learned. Choose tasks that "
                "the model sometimes solves, give partial rewards, raise num_generations or temperature; to go on "
                "nevertheless, raise stop_without_signal or set it to 0"
            )


def percent(share: float) -> str:
    """Returns a share as a whole percentage, such as `25 %`."""
    return f"{100 * share:.0f} %"


FLOAT32_TOLERANCE = 1e-4
_GROWTH = 10.0
_DROPPED = (FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS)

MUCH_DROPPED = 0.25
"""Share of a step's rows or tokens; dropping more is worth a warning."""


class MismatchWatch:
    """Warns of this rank's step metrics: once of each kind, and again when its cause has grown.

    A gap above `tolerance` (nats) is warned of again for each tenfold growth. A mismatch correction that drops more
    than a quarter of a step is warned of again when it drops more than half. `is_native` tells of the engine.
    """

    def __init__(self, tolerance: float, *, is_native: bool = True):
        self._tolerance, self._warn_above, self._is_native = tolerance, tolerance, is_native
        self._warn_above_dropped = MUCH_DROPPED

    def end_step(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Reads the metrics of an optimizer step, and warns if the mismatch exceeds rounding."""
        numbers = {key: metrics[key].read() for key in (MISMATCH, *_DROPPED) if key in metrics}
        gap, shares = numbers.get(MISMATCH), [numbers.get(key) or 0.0 for key in _DROPPED]
        if gap is not None and gap > self._warn_above:
            self._warn_above = gap * _GROWTH
            self._warn_of_gap(step, gap)
        if max(shares) > self._warn_above_dropped:
            self._warn_above_dropped = 2 * MUCH_DROPPED if max(shares) <= 2 * MUCH_DROPPED else 1.0
            self._warn_of_dropped(step, shares)

    def _warn_of_gap(self, step: int, gap: float) -> None:
        logger.warning(
            "step %d: training gives a sampled token a log-prob that is %.3g nats away from the one that sampling gave "
            "it (sampling/logp_mismatch), where rounding explains up to about %.1g; so the text is not quite the "
            "policy's%s",
            step,
            gap,
            self._tolerance,
            ". rollout_engine='transformers' samples in another way" if self._is_native else "",
        )

    def _warn_of_dropped(self, step: int, shares: list[float]) -> None:
        logger.warning(
            "step %d: the correction of the difference between vLLM and training drops %.0f %% of the completions and "
            "%.0f %% of the tokens, which then teach nothing (sampling/frac_dropped_rows, "
            "sampling/frac_dropped_tokens). Raise vllm_importance_sampling_clip_max, use "
            "vllm_importance_sampling_mode='token_truncate' (a product over long completions soon leaves its bounds), "
            "or let both compute alike: the same precision in vLLM and training, rollout_ahead=0",
            step,
            100 * shares[0],
            100 * shares[1],
        )


def tolerance(rounding: Rounding, temperature: float) -> float:
    """The gap (nats) that rounding explains at this sampling temperature.

    1e-4 in float32. Half precision: 64 times the distance of 1.0 to the next number (0.5 in bfloat16, 0.06 in float16
    and TF32), which is four roundings of a logit of size 16 to 32. Temperatures below 1 multiply both.
    """
    return max(FLOAT32_TOLERANCE, 64 * rounding.eps) / min(temperature, 1.0)


class BestMetric:
    """Reads the metric of evaluations that chooses the best model."""

    def __init__(self, trainer: Any):
        self._trainer, self._has_warned = trainer, False

    def of(self, metrics: Mapping[str, float]) -> float | None:
        """The metric's value; None, with one warning, if the evaluation measured nothing for it."""
        wanted = str(self._trainer.args.metric_for_best_model)
        value = metrics.get(wanted if wanted.startswith("eval_") else f"eval_{wanted}")
        if value is None and not self._has_warned:
            self._has_warned = True
            if dist.is_main():
                logger.warning(
                    "step %d: the evaluation measured nothing for metric_for_best_model=%r, as where no row gives a "
                    "loss or a function did not log it; it counts as not better than others. It has %s",
                    self._trainer.state.global_step,
                    wanted,
                    ", ".join(sorted(metrics)),
                )
        return value
