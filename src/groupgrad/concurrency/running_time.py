"""Measures time without the periods in which this process was suspended, for instance by SLURM.

System clocks go on during a suspension, so a deadline measured by them would have passed when the process resumes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

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
