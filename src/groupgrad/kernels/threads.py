"""Keeps OpenMP threads that wait for each other from using processor time."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path

import torch

from groupgrad.kernels.compile import openmp_runtime

logger = logging.getLogger(__name__)

WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables that say how libgomp's threads wait; the user's choice stays."""

_lock = threading.Lock()
_holder: threading.Thread | None = None


def limit_spinning() -> None:
    """Lets the threads of GNU's OpenMP runtime sleep after microseconds of waiting, for the rest of the process.

    By default a thread that waits for the others spins for milliseconds. Where other processes use the cores, the
    spinning keeps the awaited thread from running, and each of the many short parallel regions of a small model takes a
    scheduler's time slice. libgomp has no function that changes this, but it spins 3,000 times less once a process has
    more OpenMP threads than cores. A parked thread therefore holds a team that is never used. `bench/NOTES-threads.md`
    has measurements.

    Does nothing on one thread, where `WAIT_SETTINGS` are set, and with other OpenMP runtimes.
    """
    global _holder  # noqa: PLW0603
    if torch.get_num_threads() == 1 or any(os.environ.get(name) for name in WAIT_SETTINGS):
        return
    with _lock:
        # A child process has none of its parent's threads.
        if _holder is None or not _holder.is_alive():
            runtime = openmp_runtime()
            if runtime is not None and Path(runtime).name.startswith("libgomp"):
                is_held = threading.Event()
                _holder = threading.Thread(target=_hold, args=(runtime, is_held), name="openmp-team", daemon=True)
                _holder.start()
                is_held.wait()


def _hold(runtime: str, is_held: threading.Event) -> None:
    """Starts a team that makes more threads than cores, together with that of the calling process, and keeps it."""
    try:
        library = ctypes.CDLL(runtime)
        size = max(2, len(os.sched_getaffinity(0)) - torch.get_num_threads() + 2)
        harmless = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
        library.GOMP_parallel(harmless, None, ctypes.c_uint(size), ctypes.c_uint(0))
    except (OSError, AttributeError) as error:
        logger.info("OpenMP's threads wait as they are set up to: %s", error)
        return
    finally:
        is_held.set()
    threading.Event().wait()
