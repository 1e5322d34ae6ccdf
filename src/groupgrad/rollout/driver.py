"""Runs many rollouts side by side over one engine: while some wait for tools, the engine samples the others.

A rollout is a coroutine that awaits two things: `sample_turn` for a turn of the model, and `wait_for` for futures of
tools. The driver runs on the calling thread, where the engine computes; tools run on other threads. It is not an
asyncio loop, because in a notebook the calling thread is running one already.
"""

from __future__ import annotations

import queue
import time
import types
from collections.abc import Coroutine, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from groupgrad.engines.base import Request, Sample, Session

T = TypeVar("T")


@types.coroutine
def sample_turn(request: Request) -> Generator[Request, tuple[int, Sample], tuple[int, Sample]]:
    """Samples a turn. Returns the engine's ticket, by which the next turn continues this one, and the sample."""
    return (yield request)


@dataclass(slots=True, frozen=True)
class ToolWait:
    """The results of some futures and the time that they took."""

    results: list[Any]
    """One for each future, in order."""
    seconds: float
    hidden_s: float
    """The part of `seconds` during which the engine worked for other rollouts."""


@types.coroutine
def wait_for(futures: Sequence[Future[Any]]) -> Generator[Sequence[Future[Any]], ToolWait, ToolWait]:
    """Waits until all `futures` are done; none of them may raise."""
    return (yield futures)


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
    _waiting: dict[int, tuple[Sequence[Future[Any]], float, float]] = field(default_factory=dict)
    """Futures of each waiting rollout (by index), the time when it began to wait, and `_engine_s` at that time."""
    _answered: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    """The index of the waiting rollout, once for each of its futures that is done."""
    _engine_s: float = 0.0
    """Seconds that the engine has worked."""

    def run(self) -> list[T]:
        """Runs all coroutines; returns their values, in order. If one raises, all are closed before it is raised."""
        try:
            for index in range(len(self.rollouts)):
                self._resume(index, None)
            while self._sampling or self._waiting:
                for index in self._next_answered():
                    self._resume(index, self._end_wait(*self._waiting.pop(index)))
                for ticket, sample in self._advance_engine():
                    self._resume(self._sampling.pop(ticket), (ticket, sample))
        finally:
            for rollout in self.rollouts:
                rollout.close()
        return [self._results[index] for index in range(len(self.rollouts))]

    def _resume(self, index: int, value: tuple[int, Sample] | ToolWait | None) -> None:
        """Runs a rollout up to its next turn or wait, or to its end."""
        try:
            awaited = self.rollouts[index].send(value)
        except StopIteration as end:
            self._results[index] = end.value
            if index in self._last_tickets:
                self.session.release(self._last_tickets[index])
            return
        if isinstance(awaited, Request):
            ticket = self.session.submit(awaited)
            self._sampling[ticket], self._last_tickets[index] = index, ticket
            return
        self._waiting[index] = (awaited, time.perf_counter(), self._engine_s)
        for future in awaited:
            future.add_done_callback(lambda _: self._answered.put(index))
        if not awaited:
            self._answered.put(index)

    def _next_answered(self) -> list[int]:
        """Rollouts whose futures are all done. Blocks until a future is done if the engine has nothing to do."""
        indices = set() if self._sampling else {self._answered.get()}
        while not self._answered.empty():
            indices.add(self._answered.get())
        return [
            index
            for index in sorted(indices & self._waiting.keys())
            if all(future.done() for future in self._waiting[index][0])
        ]

    def _advance_engine(self) -> list[tuple[int, Sample]]:
        if not self._sampling:
            return []
        started = time.perf_counter()
        ended = self.session.advance()
        self._engine_s += time.perf_counter() - started
        return ended

    def _end_wait(self, futures: Sequence[Future[Any]], began: float, engine_s_before: float) -> ToolWait:
        seconds = time.perf_counter() - began
        hidden_s = min(seconds, self._engine_s - engine_s_before)
        return ToolWait([future.result() for future in futures], seconds, hidden_s)
