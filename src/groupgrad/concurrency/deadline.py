"""Deadlines of calls: the time that counts, and the interrupt of a call on this thread.

Time in which this process is suspended, for instance by SLURM, does not count. System clocks go on meanwhile, so a
deadline measured by them would have passed when the process resumes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from groupgrad.activity import end_process
from groupgrad.interrupt import Interrupt

SLICE_S = 0.5
"""Longest single wait. One that takes more than twice as long counts as twice as long."""


def slices(seconds: float | None) -> Iterator[float]:
    """Yields the lengths of waits that together take `seconds`, without end for None.

    The caller waits for each length before it takes the next one.
    """
    left_s = float("inf") if seconds is None else seconds
    while left_s > 0:
        began = time.monotonic()
        yield min(left_s, SLICE_S)
        left_s -= min(time.monotonic() - began, 2 * SLICE_S)


class RunningTime:
    """Seconds since it was made, read on any thread.

    A pause of more than `2 * SLICE_S` without a `tick` counts as the computing time in it: the process was suspended,
    or a call has computed and kept Python's lock, so that no other thread could call `tick`.
    """

    def __init__(self) -> None:
        self._seen = 0.0, time.monotonic(), time.process_time()

    def seconds(self) -> float:
        """The time so far."""
        counted, woke, computed = self._seen
        return counted + min(time.monotonic() - woke, max(time.process_time() - computed, 2 * SLICE_S))

    def tick(self) -> float:
        """The time so far. For one thread, which calls it every `SLICE_S` seconds or more often."""
        self._seen = self.seconds(), time.monotonic(), time.process_time()
        return self._seen[0]


REACTION_S = 8.0
"""Time that a call has to end once it is interrupted, before its process is ended."""

TICK_S = 0.25
"""Time between two looks at the clock."""

T = TypeVar("T")


class DeadlinePassed(BaseException):
    """Raised in a call at its deadline; no `except Exception` takes it for its own."""


def call_within(seconds: float, call: Callable[[], T], message: str) -> T:
    """Returns what the call returns; raises DeadlinePassed in it after `seconds`, as `interrupt.py` does.

    If the call has not ended `REACTION_S` seconds after the deadline, the process exits with `message` and code 70.
    Time in which the process is suspended does not count.
    """
    deadline = _Deadline(seconds, message)
    try:
        try:
            deadline.start()
            return call()
        finally:
            deadline.end()
    finally:  # on another thread the exception may come at the first instruction of the first `end`
        deadline.end()


class _Deadline:
    def __init__(self, seconds: float, message: str):
        self._seconds, self._message = seconds, message
        self._time = RunningTime()
        self._done = threading.Event()
        self._interrupt = Interrupt(lambda: DeadlinePassed() if self._time.seconds() >= self._seconds else None)

    def start(self) -> None:
        self._interrupt.start()
        self._interrupt.ask_after(self._seconds + 1.0)
        threading.Thread(target=self._watch, name="call-deadline", daemon=True).start()

    def end(self) -> None:
        """Ends the watch and the interrupt; a second call changes nothing."""
        self._done.set()
        self._interrupt.end()

    def _watch(self) -> None:
        interrupted_at = float("-inf")
        while (seconds := self._time.tick()) < self._seconds + REACTION_S:
            left_s = max(self._seconds - seconds, 0.0)
            self._interrupt.ask_after(left_s + 1.0)  # where the call keeps this thread from running again
            if not left_s and seconds > interrupted_at + 1.0:  # a bare `except` may swallow the first ones
                interrupted_at = seconds
                self._interrupt.throw()
            if self._done.wait(min(left_s or TICK_S, TICK_S)):
                return
        end_process(self._message)
