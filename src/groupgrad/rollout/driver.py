"""Runs many rollouts side by side over one engine: while some wait for tools, the engine samples the others.

A rollout is a coroutine that awaits two things: `sample_turn` for a turn of the model, and `wait_for` for futures of
tools. The driver runs on the calling thread, where the engine computes; tools run on other threads. It is not an
asyncio loop, because in a notebook the calling thread is running one already.

An engine that samples whole batches takes about as long for one row as for many, so its rows come in waves: a call
waits for rollouts whose tools answer within the time of a call.
"""

from __future__ import annotations

import math
import queue
import time
import types
from collections.abc import Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from groupgrad.engines.base import BatchSession, Request, Sample, Session

T = TypeVar("T")

LEAST_PATIENCE_S = 0.1
"""A wave waits as long for a rollout even if calls of the engine take less, since threads of tools take a moment."""

AT_ONCE_S = 0.05
"""Seconds that a wave waits for further requests that a program may send together with one."""


class Abandoned(Exception):
    """The answer that a turn was sampled for is no longer wanted."""


@types.coroutine
def sample_turn(
    request: Request, answer: Future[Any] | None = None
) -> Generator[tuple[Request, Future[Any] | None], tuple[int, Sample], tuple[int, Sample]]:
    """Samples a turn. Returns the engine's ticket, by which the next turn continues this one, and the sample.

    If `answer`, which the sample is for, is done before (cancelled, or set to an error), it is sampled no further, and
    Abandoned is raised.
    """
    return (yield request, answer)


@dataclass(slots=True, frozen=True)
class ToolWait:
    """The results of some futures and the time that they took."""

    results: list[Any]
    """One for each future, in order."""
    seconds: float
    hidden_s: float
    """The part of `seconds` during which the engine worked for other rollouts."""


@dataclass(slots=True, frozen=True)
class _Wait:
    """What a rollout waits for."""

    futures: Sequence[Future[Any]]
    quick_s: float
    began: float
    engine_s: float
    """Seconds that the engine had worked when the wait began."""


@types.coroutine
def wait_for(
    futures: Sequence[Future[Any]], *, quick_s: float = math.inf
) -> Generator[tuple[Sequence[Future[Any]], float], ToolWait, ToolWait]:
    """Waits until all `futures` are done; none of them may raise.

    A wave of rows waits at most `quick_s` for it; with 0 the rollout samples no further turn.
    """
    return (yield futures, quick_s)


@dataclass(slots=True)
class Driver(Generic[T]):
    """Runs coroutines to their ends over `session`. Single use.

    The order in which tools answer decides when a row is sampled, never its text, which depends on its own request.
    """

    session: Session
    rollouts: list[Coroutine[Any, Any, T]]
    _results: dict[int, T] = field(default_factory=dict)
    """Return values by the rollout's index."""
    _sampling: dict[int, int] = field(default_factory=dict)
    """Indices of the rollouts being sampled, by ticket."""
    _last_tickets: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, _Wait] = field(default_factory=dict)
    """By the rollout's index."""
    _answered: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    """The index of the waiting rollout, once for each of its futures that is done."""
    _abandoned: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    """Tickets whose answers are done."""
    engine_s: float = 0.0
    """Seconds that the engine has worked so far."""
    _patience_s: float = field(default_factory=lambda: LEAST_PATIENCE_S)
    """Seconds that a wave waits for a rollout at most: those of the engine's last call."""

    def run(self) -> list[T]:
        """Runs all coroutines; returns their values, in order. If one raises, all are closed before it is raised."""
        count = len(self.rollouts)
        try:
            for index in range(count):
                self._resume(index, None)
            while self._sampling or self._waiting:
                answered = self._next_answered()
                self._abort_abandoned()  # first, so that what is asked again finds the first request ended
                for index in answered:
                    self._resume(index, self._end_wait(self._waiting.pop(index)))
                if self._wave_waits_s() > 0 or not self._answered.empty():
                    continue  # what has been answered meanwhile may sample in the same call
                for ticket, sample in self._advance_engine():
                    self._resume(self._sampling.pop(ticket), (ticket, sample))
        finally:
            for rollout in self.rollouts:
                rollout.close()
        return [self._results[index] for index in range(count)]

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs a further coroutine to its end beside the others; only one that runs may call this."""
        self.rollouts.append(coroutine)
        self._resume(len(self.rollouts) - 1, None)

    def _resume(self, index: int, value: tuple[int, Sample] | ToolWait | Abandoned | None) -> None:
        """Runs a rollout up to its next turn or wait, or to its end."""
        rollout = self.rollouts[index]
        try:
            awaited = rollout.throw(value) if isinstance(value, Abandoned) else rollout.send(value)
        except StopIteration as end:
            self._results[index] = end.value
            if index in self._last_tickets:
                self.session.release(self._last_tickets[index])
            return
        if isinstance(awaited[0], Request):
            request, answer = awaited
            ticket, last = self.session.submit(request), self._last_tickets.get(index)
            if last is not None and request.continues != last:
                self.session.release(last)
            self._sampling[ticket], self._last_tickets[index] = index, ticket
            if answer is not None:
                answer.add_done_callback(lambda _: self._abandoned.put(ticket))
            return
        futures, quick_s = awaited
        self._waiting[index] = _Wait(futures, quick_s, time.perf_counter(), self.engine_s)
        for future in futures:
            future.add_done_callback(lambda _: self._answered.put(index))
        if not futures:
            self._answered.put(index)

    def _next_answered(self) -> list[int]:
        """Rollouts whose futures are all done.

        Blocks until a future is done if the engine has nothing to do, and while its next wave waits.
        """
        indices: set[int] = set()
        if not self._sampling:
            indices.add(self._answered.get())
        elif (seconds := self._wave_waits_s()) > 0:
            with suppress(queue.Empty):
                indices.add(self._answered.get(timeout=seconds))
        while not self._answered.empty():
            indices.add(self._answered.get())
        return [
            index
            for index in sorted(indices & self._waiting.keys())
            if all(future.done() for future in self._waiting[index].futures)
        ]

    def _wave_waits_s(self) -> float:
        """Seconds for which the rows of a whole batch wait for others whose tools may be quick; 0 to sample now.

        A tool is quick as long as it has not taken longer than a call of the engine, which waiting for it saves. So
        waiting costs at most as much as it may save, and a slow or hanging tool keeps no wave longer than that.
        """
        if not isinstance(self.session, BatchSession) or not self._sampling:
            return 0.0
        ends = [wait.began + min(wait.quick_s, self._patience_s) for wait in self._waiting.values() if wait.quick_s]
        return max(0.0, max(ends) - time.perf_counter()) if ends else 0.0

    def _abort_abandoned(self) -> None:
        """Ends turns whose answers are no longer wanted. Most tickets here are of turns that have ended anyway."""
        while not self._abandoned.empty():
            ticket = self._abandoned.get()
            if ticket in self._sampling:
                self.session.abort([ticket])
                self._resume(self._sampling.pop(ticket), Abandoned())

    def _advance_engine(self) -> list[tuple[int, Sample]]:
        if not self._sampling:
            return []
        started = time.perf_counter()
        ended = self.session.advance()
        took = time.perf_counter() - started
        self.engine_s += took
        self._patience_s = max(LEAST_PATIENCE_S, took)
        return ended

    def _end_wait(self, wait: _Wait) -> ToolWait:
        seconds = time.perf_counter() - wait.began
        hidden_s = min(seconds, self.engine_s - wait.engine_s)
        return ToolWait([future.result() for future in wait.futures], seconds, hidden_s)
