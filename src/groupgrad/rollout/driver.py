"""Many rollouts at once over one engine: while one waits for a tool, the others are sampled.

A rollout is a coroutine that awaits two things, a `Turn` of the model and `Replies` of tools. The driver runs on the
calling thread, where the engine computes; tools run elsewhere and end in futures.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Coroutine, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from groupgrad.engines.base import Request, Sample, Session

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class TurnResult:
    """A turn of the model."""

    sample: Sample
    ticket: int
    """By which a later request continues it."""


@dataclass(slots=True, frozen=True)
class Turn:
    """Awaited, asks the model for a turn; gives `TurnResult`."""

    request: Request

    def __await__(self) -> Generator[Turn, TurnResult, TurnResult]:
        return (yield self)


@dataclass(slots=True, frozen=True)
class ToolWait:
    """What was waited for, and for how long."""

    results: list[Any]
    """Of the futures, in their order."""
    seconds: float
    hidden_s: float
    """Those of them during which the engine worked."""


@dataclass(slots=True, frozen=True)
class Replies:
    """Awaited, waits for all of some futures, which must not fail; gives `ToolWait`."""

    futures: Sequence[Future[Any]]

    def __await__(self) -> Generator[Replies, ToolWait, ToolWait]:
        return (yield self)


@dataclass(slots=True)
class _Wait:
    """A rollout that waits."""

    replies: Replies
    since: float
    busy_before: float
    """Seconds that the engine had worked when the waiting began."""


@dataclass(slots=True)
class Driver:
    """Runs coroutines to their ends over `session`.

    The order in which tools answer changes when a row is sampled, never what: its text depends on its own request.
    """

    session: Session
    _busy_s: float = 0.0
    """Seconds that the engine has worked."""
    _done: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    """Numbers of rollouts whose futures are done."""

    def run(self, rollouts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """What each coroutine returns, in their order. What one raises is raised, after the others are closed."""
        results: dict[int, T] = {}
        owners: dict[int, int] = {}
        tickets: dict[int, int] = {}
        waits: dict[int, _Wait] = {}

        def go_on(number: int, value: Any) -> None:
            try:
                asked = rollouts[number].send(value)
            except StopIteration as end:
                results[number] = end.value
                if number in tickets:
                    self.session.release(tickets[number])
                return
            if isinstance(asked, Turn):
                tickets[number] = self.session.submit(asked.request)
                owners[tickets[number]] = number
            else:
                waits[number] = _Wait(asked, time.perf_counter(), self._busy_s)
                self._watch(number, asked.futures)

        try:
            for number in range(len(rollouts)):
                go_on(number, None)
            while owners or waits:
                for number in self._answered(block=not owners):
                    go_on(number, self._end(waits.pop(number)))
                if owners:
                    for ticket, sample in self._advance():
                        go_on(owners.pop(ticket), TurnResult(sample, ticket))
        finally:
            for rollout in rollouts:
                rollout.close()
        return [results[number] for number in range(len(rollouts))]

    def _advance(self) -> list[tuple[int, Sample]]:
        started = time.perf_counter()
        ended = self.session.advance()
        self._busy_s += time.perf_counter() - started
        return ended

    def _watch(self, number: int, futures: Sequence[Future[Any]]) -> None:
        """Put `number` into the queue when all futures are done."""
        lock, left = threading.Lock(), set(range(len(futures)))

        def note(place: int) -> None:
            with lock:
                left.discard(place)
                if left:
                    return
            self._done.put(number)

        for place, future in enumerate(futures):
            future.add_done_callback(lambda _future, place=place: note(place))
        if not futures:
            self._done.put(number)

    def _answered(self, *, block: bool) -> list[int]:
        """Rollouts whose waiting has ended; waits for one at least if the engine has nothing to do."""
        numbers = [self._done.get()] if block else []
        while not self._done.empty():
            numbers.append(self._done.get())
        return sorted(numbers)

    def _end(self, wait: _Wait) -> ToolWait:
        seconds = time.perf_counter() - wait.since
        hidden_s = min(seconds, self._busy_s - wait.busy_before)
        return ToolWait([future.result() for future in wait.replies.futures], seconds, hidden_s)
