"""Records what the training thread does, for how long, and its last sign of life, for the watches that end a hang."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

WAITING = "waiting for the other ranks"
"""Activity of a rank that waits in a collective, so that another rank is to blame for its silence."""


EXIT_HUNG = 70
"""Exit code of a process that is ended since it hangs: "internal software error" of sysexits.h (EX_SOFTWARE)."""


class Hung(BaseException):
    """Raised in a thread that has shown no sign of life for too long; `except Exception` does not catch it."""


class OtherRankFailed(BaseException):
    """Raised in a thread whose work is useless because another rank has ended; `except Exception` does not catch it."""


@dataclass(slots=True, frozen=True)
class Activity:
    """One thing that the training thread does."""

    what: str
    """Phase or function, as messages name it."""
    details: Callable[[], str]
    """Rows in flight, for messages."""


_open: list[Activity] = []
_last_sign = [0.0]


def sign_of_life() -> None:
    """Notes that the present activity goes on. Costs next to nothing; for any thread."""
    _last_sign[0] = time.monotonic()


@contextmanager
def doing(what: str, details: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Context of an activity; those inside it are shown in its place. For the training thread only."""
    _open.append(Activity(what, details))
    sign_of_life()
    try:
        yield
    finally:
        _open.pop()
        sign_of_life()


def present() -> tuple[Activity | None, float]:
    """The innermost activity, None outside any, and the seconds since its last sign of life."""
    silent = time.monotonic() - _last_sign[0]
    return (_open[-1] if _open else None), silent


def end_process(reason: str) -> NoReturn:
    """Ends this process, whose training thread does not react, with a line that has the reason."""
    try:
        print(f"groupgrad: error: {reason}", file=sys.stderr, flush=True)
    finally:
        os._exit(EXIT_HUNG)


class Timings:
    """Seconds spent in each named phase since the last `take`.

    Time is exclusive: an outer phase does not count while an inner one runs, so the phases sum to the total time spent
    in any of them. Work that an accelerator still has queued when a phase ends counts for the phase that waits for it.
    For one thread only.

    `on_phase` is called with a phase's name when it begins, and with the outer phase's name when an inner one ends.
    """

    def __init__(
        self, on_phase: Callable[[str], object] = lambda _: None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.on_phase = on_phase
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._counted_until = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context whose time counts for `name`, also when it ends in an exception."""
        self._settle()
        self._open.append(name)
        try:
            self.on_phase(name)
            with doing(name):
                yield
        finally:
            self._settle()
            self._open.pop()
            if self._open:
                self.on_phase(self._open[-1])

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase, in the order first seen, and resets them to zero.

        Open phases return their time so far and continue to count.
        """
        self._settle()
        seconds, self._seconds = self._seconds, dict.fromkeys(self._open, 0.0)
        return seconds

    def _settle(self) -> None:
        """Counts the time since the last call for the innermost open phase."""
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._counted_until
        self._counted_until = now
