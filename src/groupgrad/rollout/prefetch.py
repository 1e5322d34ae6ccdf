"""Samples generation batches from vLLM, which has a copy of the weights, on request or ahead of time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from groupgrad import dist
from groupgrad.activity import Timings
from groupgrad.engines.base import EngineWithWeights
from groupgrad.errors import WeightsLost
from groupgrad.rollout.requests import GenerationRequest, RolloutSource
from groupgrad.types import Rollout

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Maximum number of times that a generation batch is sampled because its engine lost the weights meanwhile."""


class RolloutPrefetcher:
    """Samples generation batches from vLLM, each when it is requested or ahead of time.

    With `ahead=k` a thread samples up to k following generation batches while one is trained, from weights that are at
    most k generation batches old. New weights are sent when no rank samples. With `in_flight` they are sent for each
    generation batch, and rows in progress continue with them. If an engine loses its weights on any rank, all ranks
    sample the generation batch again from the present weights, `ATTEMPTS` times at most. Other exceptions of the thread
    are raised when its generation batch is requested.
    """

    def __init__(
        self,
        source: RolloutSource,
        timings: Timings,
        weights: EngineWithWeights,
        *,
        ahead: int = 0,
        in_flight: bool = False,
    ):
        self._source, self._timings, self._weights, self.ahead = source, timings, weights, ahead
        self._in_flight = in_flight
        self._threads: ThreadPoolExecutor | None = None
        self._jobs: dict[int, Future[list[Rollout]]] = {}
        """Generation batches begun ahead, by number."""

    def __call__(self, request: GenerationRequest, upcoming: Sequence[GenerationRequest] = ()) -> list[Rollout]:
        """Collective. This rank's rollouts of a generation batch, in the order of its row numbers.

        Begins to sample `upcoming` generation batches as far as `ahead` allows. A failure on any rank is raised on all.
        """
        if not self.ahead:
            return self._sample(request)
        if request.phase != "train":
            self._wait()
            return self._sample(request)
        job = self._jobs.pop(request.number, None)
        rollouts = self._on_all_ranks(request, lambda: None if job is None else job.result())
        if rollouts is None:
            self._wait()
            rollouts = self._sample(request)
        elif self._is_idle():
            self._refresh(request.step)
        elif self._in_flight:
            self._refresh(request.step, keeps_rows=True)
        else:
            return rollouts
        self._begin([replace(later, step=request.step) for later in upcoming[: self.ahead]])
        return rollouts

    def close(self) -> None:
        """Cancels what is sampled ahead. May be called any number of times."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.cancel()
        if self._threads is not None:
            self._weights.stop()
            self._threads.shutdown(wait=True)
            self._threads = None

    def _sample(self, request: GenerationRequest) -> list[Rollout]:
        """Collective. Samples a generation batch from the present weights."""
        for attempts_left in reversed(range(ATTEMPTS)):
            self._refresh(request.step)
            rollouts = self._on_all_ranks(request, lambda: self._source(request), may_lose_weights=attempts_left > 0)
            if rollouts is not None:
                self._weights.sleep()
                return rollouts
            self._weights.invalidate()
        raise AssertionError("the last attempt returns or raises")

    def _on_all_ranks(
        self, request: GenerationRequest, get: Callable[[], list[Rollout] | None], *, may_lose_weights: bool = True
    ) -> list[Rollout] | None:
        """Collective. The rollouts that `get` returns, or None if it returns none or loses the weights on any rank."""
        rollouts: list[Rollout] | None = None
        with self._timings.phase("sampling"), dist.errors_on_all_ranks():
            try:
                rollouts = get()
            except WeightsLost as error:
                if not may_lose_weights:
                    raise
                logger.warning("generation batch %d is sampled anew: %s", request.number, error)
        is_missing = any(dist.all_gather_objects(rollouts is None))
        return None if is_missing else rollouts

    def _refresh(self, policy_step: int, *, keeps_rows: bool = False) -> None:
        with self._timings.phase("weights"):
            self._weights.refresh(policy_step, keeps_rows=keeps_rows)

    def _is_idle(self) -> bool:
        """Collective. True if no rank samples anything."""
        return not any(dist.all_gather_objects(any(not job.done() for job in self._jobs.values())))

    def _wait(self) -> None:
        """Collective. Waits until no rank samples; finished rollouts are kept for their generation batch."""
        with self._timings.phase("sampling"), dist.errors_on_all_ranks():
            for job in self._jobs.values():
                job.exception()

    def _begin(self, requests: Sequence[GenerationRequest]) -> None:
        if self._threads is None:
            # One thread: agents and their environments take one generation batch at a time.
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollouts-ahead")
        for request in requests:
            if request.number not in self._jobs:
                self._jobs[request.number] = self._threads.submit(self._sample_frozen, request)

    def _sample_frozen(self, request: GenerationRequest) -> list[Rollout]:
        with self._weights.freeze_weights():
            return self._source(request)
