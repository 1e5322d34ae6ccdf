"""Makes waiting OpenMP threads sleep instead of spin while other processes need the cores."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from pathlib import Path

import torch

from groupgrad.kernels.compile import openmp_runtime

logger = logging.getLogger(__name__)

WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables that say how libgomp's threads wait; the user's choice stays."""

CHECK_S = 0.5
"""Seconds between two measurements of how long this process's threads wait for a core."""

CROWDED, CALM = 0.10, 0.05
"""Shares of their time that threads wait for a core: other processes use the cores above the first, none below the
second."""

MAX_PATIENCE = 64
"""Maximum number of consecutive calm measurements before threads may spin again; it starts at 1 and doubles each time
that the cores were crowded again."""

_lock = threading.Lock()
_watched_process: int | None = None


def limit_spinning() -> None:
    """Makes waiting threads of GNU's OpenMP runtime sleep while other processes use the cores.

    By default a thread that waits for the others spins for milliseconds. On cores of its own that is the fastest way.
    Where other processes use the cores, the spinning keeps the awaited thread from running, and each of the many short
    parallel regions of a small model takes a scheduler's time slice. libgomp has no function that changes this, but it
    spins 3,000 times less while a process has more OpenMP threads than cores. A `ParkedTeam` therefore adds idle
    threads, and is released while the cores are free. The threads that compute stay the same, so all numbers do too.

    Does nothing on one thread, where `WAIT_SETTINGS` are set, and with other OpenMP runtimes.
    """
    global _watched_process  # noqa: PLW0603
    if torch.get_num_threads() == 1 or any(os.environ.get(name) for name in WAIT_SETTINGS):
        return
    with _lock:
        # A child process has none of its parent's threads.
        if _watched_process != os.getpid():
            runtime = openmp_runtime()
            if runtime is not None and Path(runtime).name.startswith("libgomp"):
                _watched_process = os.getpid()
                watch = SpinningWatch(ParkedTeam(runtime), CoreWaits())
                threading.Thread(target=watch.run, name="openmp-watch", daemon=True).start()


class ParkedTeam:
    """OpenMP threads that are never used: while they exist, the process has more of them than cores.

    Args:
        runtime: Path of the libgomp that torch uses.
    """

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self._release = threading.Event()
        self._thread: threading.Thread
        self.is_parked = False
        self.park()

    def park(self) -> None:
        """Makes the team, and returns when it exists."""
        is_made = threading.Event()
        self._release.clear()
        self._thread = threading.Thread(target=self._hold, args=(is_made,), name="openmp-team", daemon=True)
        self._thread.start()
        is_made.wait()
        self.is_parked = True

    def release(self) -> None:
        """Ends the team: libgomp frees it when the thread that made it ends."""
        self._release.set()
        self._thread.join()
        self.is_parked = False

    def _hold(self, is_made: threading.Event) -> None:
        try:
            library = ctypes.CDLL(self._runtime)
            size = max(2, len(os.sched_getaffinity(0)) - torch.get_num_threads() + 2)
            harmless = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
            library.GOMP_parallel(harmless, None, ctypes.c_uint(size), ctypes.c_uint(0))
        except (OSError, AttributeError) as error:
            logger.info("OpenMP's threads wait as they are set up to: %s", error)
            return
        finally:
            is_made.set()
        self._release.wait()


class CoreWaits:
    """Reads from Linux how long threads of this process were ready to run but had no core.

    Args:
        tasks: Folder with a folder for each thread, whose file `schedstat` has nanoseconds on a core and nanoseconds of
            waiting for one (`Documentation/scheduler/sched-stats.rst` of the kernel).
    """

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._last: dict[str, tuple[int, int]] = {}

    def share(self) -> float | None:
        """Waiting time divided by running and waiting time since the last call; None if threads were almost idle.

        Raises:
            OSError: Where the kernel has no such counts.
        """
        times, last = self._times(), self._last
        self._last = times
        ran, waited = (sum(now[i] - last.get(task, (0, 0))[i] for task, now in times.items()) for i in (0, 1))
        return waited / (ran + waited) if ran + waited > 0.1 * CHECK_S * 1e9 else None

    def _times(self) -> dict[str, tuple[int, int]]:
        times = {}
        for task in self._tasks.iterdir():
            try:
                ran, waited, _ = (task / "schedstat").read_text().split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has ended
            times[task.name] = int(ran), int(waited)
        return times


class SpinningWatch:
    """Parks the team while other processes use the cores, and releases it when they no longer do."""

    def __init__(self, team: ParkedTeam, waits: CoreWaits) -> None:
        self._team = team
        self._waits = waits
        self._patience = 1
        self._calm_looks = 0

    def run(self) -> None:
        """Measures every `CHECK_S` seconds until the process ends; where Linux counts no waits, parks the team."""
        try:
            while True:
                time.sleep(CHECK_S)
                self.check()
        except (OSError, ValueError) as error:
            logger.info("OpenMP's threads sleep while they wait, since waits for a core cannot be read: %s", error)
            if not self._team.is_parked:
                self._team.park()

    def check(self) -> None:
        """Parks or releases the team by what threads waited since the last call."""
        share = self._waits.share()
        if share is None:
            return
        self._calm_looks = self._calm_looks + 1 if share < CALM else 0
        if self._team.is_parked and self._calm_looks >= self._patience:
            self._team.release()
        elif not self._team.is_parked and share > CROWDED:
            self._team.park()
            self._patience = min(2 * self._patience, MAX_PATIENCE)
