"""Collects the numbers of one optimizer step: seconds, completion lengths and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupgrad import dist
from groupgrad.metrics import Metric, average, merge_all
from groupgrad.objectives import FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS, PolicyLoss
from groupgrad.telemetry.timings import Timings
from groupgrad.trainer.mismatch_watch import MISMATCH

_PHASES = ("sampling", "rewards", "scoring", "training")
"""Parts of a step whose seconds are logged as `time/...`; they do not overlap, and `step_time` is about their sum."""
_READ_BY_CONTROLLERS = ("entropy", MISMATCH, FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS)


@dataclass(slots=True, frozen=True)
class StepNumbers:
    """Numbers of a finished step on this rank."""

    metrics: dict[str, Metric]
    """`step_time` and `time/...` (seconds)."""
    measured: dict[str, Metric]
    """Metrics of the step's losses that decide on the next step or on a warning."""
    mean_length: float | None
    """Mean completion length of the rollouts that the step sampled; None if it sampled none."""
    tokens_per_second: float
    """Sampled over all ranks, estimated from this one."""


class StepLog:
    """Accumulates the numbers of the present step; `finish` returns and resets them."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Sampled tokens of each rollout."""
        self._seconds = 0.0
        self._metrics: list[Mapping[str, Metric]] = []

    def add(self, losses: Sequence[PolicyLoss], *, seconds: float) -> None:
        """Count a micro-batch that took `seconds`; does not wait for the device."""
        self._seconds += seconds
        self._metrics += [
            {key: loss.metrics[key] for key in _READ_BY_CONTROLLERS if key in loss.metrics} for loss in losses
        ]

    def finish(self, timings: Timings, *, has_weights: bool) -> StepNumbers:
        """The numbers of the step; with `has_weights` the seconds of sending weights to the engine are among them."""
        seconds, lengths = timings.take(), self.lengths
        phases = (*_PHASES, "weights") if has_weights else _PHASES
        numbers = StepNumbers(
            metrics={
                "step_time": average(self._seconds),
                **{f"time/{phase}": average(seconds.get(phase, 0.0)) for phase in phases},
            },
            measured=merge_all(self._metrics),
            mean_length=sum(lengths) / len(lengths) if lengths else None,
            tokens_per_second=sum(lengths) * dist.world_size() / max(seconds.get("sampling", 0.0), 1e-9),
        )
        self.lengths, self._seconds, self._metrics = [], 0.0, []
        return numbers
