"""Where the wall-clock time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timings:
    """Seconds spent in each named phase since they were last taken.

    Time is exclusive: while a phase runs inside another, the clock of the outer one stands still, so the phases sum to
    the time spent in any of them. Seconds are those of the calling process; work that an accelerator still has queued
    when a phase ends counts for the phase that waits for it. For one thread only.

    `on_phase` is called with a phase's name when it begins and with the outer phase's name when an inner one ends; it
    is not called when the outermost one ends.
    """

    def __init__(
        self, on_phase: Callable[[str], None] | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.on_phase = on_phase
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._mark = 0.0

    @property
    def current(self) -> str | None:
        """The innermost open phase, or None."""
        return self._open[-1] if self._open else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A `with` block whose time counts for `name`, also when it ends in an exception."""
        self._settle()
        self._open.append(name)
        self._seconds.setdefault(name, 0.0)
        try:
            self._announce(name)
            yield
        finally:
            self._settle()
            self._open.pop()
            if self._open:
                self._announce(self._open[-1])

    @contextmanager
    def inclusive(self, name: str) -> Iterator[None]:
        """A phase whose time, that of the phases inside it included, counts for none but `name`."""
        with self.phase(name):
            self._settle()
            before = self._seconds
            self._seconds = dict.fromkeys(self._open, 0.0)
            try:
                yield
            finally:
                self._settle()
                before[name] += sum(self._seconds.values())
                self._seconds = before

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last take, in the order first seen; then the count starts again at zero.

        Phases still open give what they have used so far and go on counting.
        """
        self._settle()
        taken, self._seconds = self._seconds, dict.fromkeys(self._open, 0.0)
        return taken

    def _settle(self) -> None:
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._mark
        self._mark = now

    def _announce(self, name: str) -> None:
        if self.on_phase is not None:
            self.on_phase(name)
