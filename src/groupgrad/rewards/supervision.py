"""Options and counters for deadlines, retries and failures of reward functions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from groupgrad.concurrency.worker_main import class_names
from groupgrad.concurrency.workers import NoAnswer
from groupgrad.metrics import Metric, maximum, total

FailureAction = Literal["error"] | float | None
"""The reward of the rows of a failed call: a number, None for no reward, or an error."""

NUM_TIMES = 200
"""Calls whose durations are kept for the percentiles."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True, frozen=True)
class SupervisionOptions:
    """Settings that supervise the calls of reward functions."""

    timeout_s: float | None = None
    """Seconds for one attempt of one call; None is no limit."""
    num_workers: int = 0
    """Processes that run the plain functions; 0: the training process."""
    worker_memory_bytes: int | None = None
    retries: int = 0
    """Further attempts after a transient error."""
    transient_errors: tuple[str, ...] = ("ConnectionError", "TimeoutError")
    """Names of exception classes; their subclasses count too."""
    on_failure: FailureAction | Mapping[str, FailureAction] = "error"
    """One for all functions, or by name; functions without an entry end the run."""
    seed: int = 0
    """Seed of the random streams in worker processes."""

    @property
    def is_active(self) -> bool:
        """True if anything is supervised."""
        return self.timeout_s is not None or bool(self.num_workers or self.retries) or self.on_failure != "error"

    def action(self, name: str) -> FailureAction:
        """Returns the outcome of a failed call of this function."""
        return self.on_failure.get(name, "error") if isinstance(self.on_failure, Mapping) else self.on_failure

    def pause_s(self, error: BaseException, attempt: int) -> float | None:
        """Seconds to wait before a function is called again after this attempt; None unless its error is transient.

        A missed deadline never is. Pauses double.
        """
        is_transient = not set(class_names(error)).isdisjoint(self.transient_errors)
        if attempt > self.retries or isinstance(error, NoAnswer) or not is_transient:
            return None
        return min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S)


@dataclass(slots=True)
class CallStatistics:
    """Durations and failures of the calls of one function on this rank."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    """Seconds of the last calls, all attempts together."""
    failures: int = 0
    """Failed calls since the last `take`, those past the deadline too."""
    timeouts: int = 0

    def take(self, name: str) -> dict[str, Metric]:
        """The metrics of the last call: durations of the slowest rank, sums of failures and timeouts."""
        median, late = np.percentile(self.times, [50, 95]) if self.times else (math.nan, math.nan)
        metrics = {
            f"time/rewards/{name}/p50": maximum(float(median)),
            f"time/rewards/{name}/p95": maximum(float(late)),
            f"time/rewards/{name}/max": maximum(self.times[-1] if self.times else math.nan),
            f"rewards/{name}/failures": total(self.failures),
            f"rewards/{name}/timeouts": total(self.timeouts),
        }
        self.failures = self.timeouts = 0
        return metrics
