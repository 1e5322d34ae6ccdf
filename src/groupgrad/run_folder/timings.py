"""Measures the wall-clock time of the phases of a training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from groupgrad.activity import doing


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
