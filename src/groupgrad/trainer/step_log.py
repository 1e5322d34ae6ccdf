"""Collects the rollouts, losses and durations of an optimizer step for its log line, progress bar and watches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from groupgrad import dist
from groupgrad.metrics import Metric, average, merge_all
from groupgrad.objectives import FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS, PolicyLoss
from groupgrad.rollout.collector import Experience
from groupgrad.run_folder.timings import Timings
from groupgrad.trainer.sampler_logprobs import MISMATCH

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
            if trainer.signal_watch is not None:
                trainer.signal_watch.read(experience.metrics)
            trainer.progress.set_numbers(reward=experience.mean_reward)
        lengths = [rollout.num_sampled for experience in step.experiences for rollout in experience.rollouts]
        if lengths:
            # Over all ranks, estimated from this one.
            speed = sum(lengths) * dist.world_size() / max(step.sampling_s, 1e-9)
            trainer.progress.set_numbers(length=sum(lengths) / len(lengths), tokens_per_second=speed)
