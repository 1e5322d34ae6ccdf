"""The time that counts for the deadline of a call.

Time in which this process is suspended, for instance by SLURM, does not count. System clocks go on meanwhile, so a
deadline measured by them would have passed when the process resumes.
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
