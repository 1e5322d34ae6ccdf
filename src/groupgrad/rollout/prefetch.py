"""Samples the rollouts of generation batches on request, or ahead of time while earlier ones are trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from groupgrad import dist
from groupgrad.errors import WeightsLost
from groupgrad.rollout.requests import GenerationRequest, RolloutSource
from groupgrad.telemetry.timings import Timings
from groupgrad.types import Rollout

logger = logging.getLogger(__name__)


ATTEMPTS = 3
"""Times that a generation batch is sampled when its engine loses its weights meanwhile."""


class Weights(Protocol):
    """The weights that an engine samples from, where they are a copy of the policy's."""

    def refresh(self, policy_step: int) -> None:
        """Collective. What is sampled from now on comes from the policy as it is, at this optimizer step. Nothing may
        be sampled meanwhile."""
        ...

    def invalidate(self) -> None:
        """The engine may no longer have what it was sent: the next `refresh` sends it whatever the step is."""
        ...

    def sleep(self) -> None:
        """Nothing is sampled until the next `refresh`, so that what sampling alone needs may be given back."""
        ...

    def stop(self) -> None:
        """Have what is sampled now fail soon."""
        ...

    def freeze_weights(self) -> AbstractContextManager[None]:
        """Inside, the policy may change while rows are sampled, so it is never sent: an engine that has lost its
        weights raises WeightsLost."""
        ...


class RolloutPrefetcher:
    """Rollouts of one generation batch after the other.

    With `ahead=k` a thread samples up to k following generation batches while one is trained, from weights that are at
    most k generation batches old. New weights are sent when no rank samples. If an engine loses its weights on any
    rank, all ranks sample the generation batch again from the present weights, `ATTEMPTS` times at most. Other
    exceptions of the thread are raised when its generation batch is requested.

    `around` makes a context for sampling that all ranks enter and leave together; it is not used for sampling ahead.
    """

    def __init__(
        self,
        source: RolloutSource,
        timings: Timings,
        weights: Weights | None = None,
        *,
        ahead: int = 0,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        if ahead and weights is None:
            raise ValueError(f"ahead={ahead} needs an engine with weights of its own; set it to 0")
        self.source, self._timings, self._weights, self.ahead = source, timings, weights, ahead
        self._around = around
        self._threads: ThreadPoolExecutor | None = None
        self._jobs: dict[int, Future[list[Rollout]]] = {}

    def __call__(self, request: GenerationRequest, upcoming: Sequence[GenerationRequest] = ()) -> list[Rollout]:
        """Collective. This rank's rollouts of a generation batch, in the order of its row numbers.

        Begins to sample `upcoming` generation batches as far as `ahead` allows. A failure on any rank is raised on all.
        """
        if not self.ahead:
            return self._now(request)
        if request.phase != "train":
            self._wait()
            return self._now(request)
        rollouts, is_missing = self._begun(request)
        if is_missing:
            self._wait()
            rollouts = self._now(request)
        elif self._is_idle():
            self._refresh(request.step)
        else:
            return rollouts
        self._begin([replace(later, step=request.step) for later in upcoming[: self.ahead]])
        return rollouts

    def close(self) -> None:
        """Give up what is sampled ahead, and let go of what the source holds. May be called any number of times."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.cancel()
        if self._threads is not None:
            if self._weights is not None:
                self._weights.stop()
            self._threads.shutdown(wait=True)
            self._threads = None
        self.source.close()

    def _now(self, request: GenerationRequest) -> list[Rollout]:
        attempt, is_missing, rollouts = 0, True, []
        while is_missing:
            attempt += 1
            rollouts, is_missing = self._tried(request, is_last=attempt == ATTEMPTS)
        if self._weights is not None:
            self._weights.sleep()
        return rollouts

    def _tried(self, request: GenerationRequest, *, is_last: bool) -> tuple[list[Rollout], bool]:
        """Collective. The rollouts, and True if any rank has none because its engine lost the weights."""
        rollouts: list[Rollout] | None = None
        self._refresh(request.step)
        with self._timings.phase("sampling"), self._around(), dist.errors_on_all_ranks():
            try:
                rollouts = self.source(request)
            except WeightsLost as error:
                if is_last or self._weights is None:
                    raise
                _warn_of(request, error)
        if self._weights is None:
            return rollouts or [], False
        is_missing = any(dist.all_gather_objects(rollouts is None))
        if is_missing:
            self._weights.invalidate()
        return rollouts or [], is_missing

    def _refresh(self, policy_step: int) -> None:
        if self._weights is not None:
            with self._timings.phase("weights"):
                self._weights.refresh(policy_step)

    def _begun(self, request: GenerationRequest) -> tuple[list[Rollout], bool]:
        """Collective. Waits for a generation batch begun ahead. Its rollouts, and True if any rank has none."""
        rollouts: list[Rollout] | None = None
        job = self._jobs.pop(request.number, None)
        with dist.errors_on_all_ranks(), self._timings.phase("sampling"):
            if job is not None:
                try:
                    rollouts = job.result()
                except WeightsLost as error:
                    _warn_of(request, error)
        is_missing = any(dist.all_gather_objects(rollouts is None))
        return rollouts or [], is_missing

    def _is_idle(self) -> bool:
        """Collective. True if no rank samples anything."""
        return not any(dist.all_gather_objects(any(not job.done() for job in self._jobs.values())))

    def _wait(self) -> None:
        """Collective. Waits until no rank samples; finished rollouts are kept for their generation batch."""
        with self._timings.phase("sampling"):
            for job in self._jobs.values():
                job.exception()
        dist.all_gather_objects(None)

    def _begin(self, requests: Sequence[GenerationRequest]) -> None:
        if self._threads is None:
            # One thread: agents and their environments take one generation batch at a time.
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollouts-ahead")
        for request in requests:
            if request.number not in self._jobs:
                self._jobs[request.number] = self._threads.submit(self._sample_frozen, request)

    def _sample_frozen(self, request: GenerationRequest) -> list[Rollout]:
        assert self._weights is not None
        with self._weights.freeze_weights():
            return self.source(request)


def _warn_of(request: GenerationRequest, error: WeightsLost) -> None:
    logger.warning("generation batch %d is sampled anew: %s", request.number, error)
