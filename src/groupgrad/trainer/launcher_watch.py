"""Stops a run whose launcher (torchrun, `accelerate launch`) was killed, since nothing else would then end it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

import psutil

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Time between two looks at the launcher."""

_MARK = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun and `accelerate launch` give to the processes that they start."""


class LauncherWatch:
    """A context that watches the launcher on a thread and sends this process SIGTERM when the launcher has ended.

    A process started by a shell, a notebook or a scheduler has no launcher, so nothing is watched there: such a process
    may outlive its parent (nohup, disown, a closed terminal).
    """

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LauncherWatch:
        process = launcher()
        if process is not None:
            self._thread = threading.Thread(
                target=self._run, args=(process,), name="groupgrad-launcher-watch", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, process: psutil.Process) -> None:
        while not self._closed.wait(TICK_S):
            if has_ended(process):
                logger.warning("the launcher of this process (pid %d) was killed, so the run stops", process.pid)
                os.kill(os.getpid(), signal.SIGTERM)
                return


def launcher() -> psutil.Process | None:
    """The process that started this one and other ranks: torchrun, or a parent that uses `multiprocessing`.

    Between torchrun and this process there may be scripts, which have torchrun's variables as this one does.
    """
    try:
        parents = psutil.Process().parents()
    except psutil.Error:
        return None
    if _MARK not in os.environ:
        return parents[0] if parents and multiprocessing.parent_process() is not None else None
    for parent in parents:
        try:
            if _MARK not in parent.environ():
                return parent
        except (psutil.Error, OSError):
            return parent
    return None


def has_ended(process: psutil.Process) -> bool:
    """True for a process that has ended, also if its parent has not taken notice of that yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
