"""Runs many rollouts side by side over one engine: while some wait for tools, the engine samples the others.

A rollout is a coroutine that awaits two things: `SampleTurn` for a turn of the model, and `WaitFor` for futures of
tools. The driver runs on the calling thread, where the engine computes; tools run on other threads. It is not an
asyncio loop, because in a notebook the calling thread is running one already.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Coroutine, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from groupgrad.engines.base import Request, Sample, Session

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class TurnResult:
    """A sampled turn."""

    sample: Sample
    ticket: int
    """The engine's ticket, by which the next turn continues this one."""


@dataclass(slots=True, frozen=True)
class SampleTurn:
    """Awaitable: samples a turn and returns its `TurnResult`."""

    request: Request

    def __await__(self) -> Generator[SampleTurn, TurnResult, TurnResult]:
        return (yield self)


@dataclass(slots=True, frozen=True)
class ToolWait:
    """The results of some futures and the time that they took."""

    results: list[Any]
    """One for each future, in order."""
    seconds: float
    hidden_s: float
    """The part of `seconds` during which the engine worked for other rollouts."""


@dataclass(slots=True, frozen=True)
class WaitFor:
    """Awaitable: waits for all of some futures, which must not fail, and returns a `ToolWait`."""

    futures: Sequence[Future[Any]]

    def __await__(self) -> Generator[WaitFor, ToolWait, ToolWait]:
        return (yield self)


@dataclass(slots=True)
class _Waiting:
    """A rollout that waits for futures."""

    futures: Sequence[Future[Any]]
    since: float
    engine_s_before: float
    """Seconds that the engine had worked when the wait began."""


@dataclass(slots=True)
class Driver(Generic[T]):
    """Runs coroutines to their ends over `session`. Single use.

    The order in which tools answer decides when a row is sampled, never its text, which depends on its own request.
    """

    session: Session
    rollouts: Sequence[Coroutine[Any, Any, T]]
    _results: dict[int, T] = field(default_factory=dict)
    """Return values by the rollout's index."""
    _sampling: dict[int, int] = field(default_factory=dict)
    """Indices of the rollouts being sampled, by ticket."""
    _last_tickets: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _answered: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    """The index of the waiting rollout, once for each of its futures that is done."""
    _engine_s: float = 0.0
    """Seconds that the engine has worked."""

    def run(self) -> list[T]:
        """The return value of each coroutine, in order. An exception of one is raised after all are closed."""
        try:
            for index in range(len(self.rollouts)):
                self._resume(index, None)
            while self._sampling or self._waiting:
                for index in self._next_answered():
                    self._resume(index, self._end_wait(self._waiting.pop(index)))
                for ticket, sample in self._advance_engine():
                    self._resume(self._sampling.pop(ticket), TurnResult(sample, ticket))
        finally:
            for rollout in self.rollouts:
                rollout.close()
        return [self._results[index] for index in range(len(self.rollouts))]

    def _resume(self, index: int, value: TurnResult | ToolWait | None) -> None:
        """Run a rollout up to its next `SampleTurn` or `WaitFor`, or to its end."""
        try:
            awaited = self.rollouts[index].send(value)
        except StopIteration as end:
            self._results[index] = end.value
            if index in self._last_tickets:
                self.session.release(self._last_tickets[index])
            return
        if isinstance(awaited, SampleTurn):
            ticket = self.session.submit(awaited.request)
            self._sampling[ticket], self._last_tickets[index] = index, ticket
            return
        self._waiting[index] = _Waiting(awaited.futures, time.perf_counter(), self._engine_s)
        for future in awaited.futures:
            future.add_done_callback(lambda _: self._answered.put(index))
        if not awaited.futures:
            self._answered.put(index)

    def _next_answered(self) -> list[int]:
        """Rollouts whose futures are all done. Blocks until a future is done if the engine has nothing to do."""
        indices = set() if self._sampling else {self._answered.get()}
        while not self._answered.empty():
            indices.add(self._answered.get())
        return [
            index
            for index in sorted(indices & self._waiting.keys())
            if all(future.done() for future in self._waiting[index].futures)
        ]

    def _advance_engine(self) -> list[tuple[int, Sample]]:
        if not self._sampling:
            return []
        started = time.perf_counter()
        ended = self.session.advance()
        self._engine_s += time.perf_counter() - started
        return ended

    def _end_wait(self, waiting: _Waiting) -> ToolWait:
        seconds = time.perf_counter() - waiting.since
        hidden_s = min(seconds, self._engine_s - waiting.engine_s_before)
        return ToolWait([future.result() for future in waiting.futures], seconds, hidden_s)
