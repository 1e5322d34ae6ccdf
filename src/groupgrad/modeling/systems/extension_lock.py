"""Bounds the wait for an extension of torch, such as DeepSpeed's, while another process compiles it.

torch has the process that compiles an extension keep a file `lock` open beside it, and others wait until that file is
gone. A process that is killed meanwhile leaves the file, and torch would wait for it without end and without a word.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress

import psutil
from torch.utils.file_baton import FileBaton

from groupgrad import activity

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks at a lock."""
NOTE_S = 5.0
"""Seconds of waiting after which a message says for what."""
CONFIRM_S = 10.0
"""Shortest time for which no process has a lock open before it counts as left behind."""
QUIET_S = 300.0
"""Time without a change in the folder of a lock after which no other machine or container compiles there either."""


def bound_waits() -> None:
    """Have torch's waits for extensions, in this process from now on, say what they wait for and end."""
    FileBaton.wait = _wait


def _wait(self: FileBaton) -> None:
    """Return when the baton's lock is gone; RuntimeError for a lock that was left behind."""
    path = str(self.lock_file_path)
    began = unheld_since = time.monotonic()
    is_told = False
    while (last_change := _last_change(path)) is not None:
        holder, now = _holder(path), time.monotonic()
        if holder is None:
            activity.sign_of_life()  # the error below ends this wait, so the watchdog need not
        else:
            unheld_since = now
        quiet_s = time.time() - last_change
        if now - unheld_since >= CONFIRM_S and quiet_s > QUIET_S:
            raise RuntimeError(
                f"the file {path} says that a process compiles an extension of torch there, but no process of this "
                f"machine has it open, and nothing in its folder has changed for {quiet_s:.0f} s: a process that was "
                "killed has left it, and every run would wait for it; delete the file and start again"
            )
        if now - began >= NOTE_S and not is_told:
            is_told = True
            _tell(path, holder)
        time.sleep(POLL_S)


def _tell(path: str, holder: int | None) -> None:
    if holder is not None:
        logger.warning("process %d compiles an extension of torch, and this one waits for it: %s", holder, path)
        return
    logger.warning(
        "this process waits for an extension of torch, since the file %s says that another one compiles it, but no "
        "process of this machine has it open; if no other machine or container compiles there, a process that was "
        "killed has left it: delete it. It is an error when nothing in its folder has changed for %.0f s",
        path,
        QUIET_S,
    )


def _last_change(path: str) -> float | None:
    """Time of the last change of a file in the folder of a lock; None if the lock is gone."""
    try:
        times = [os.stat(path).st_mtime]
    except FileNotFoundError:
        return None
    with suppress(OSError):
        for entry in os.scandir(os.path.dirname(path)):
            with suppress(OSError):  # gone meanwhile
                times.append(entry.stat().st_mtime)
    return max(times)


def _holder(path: str) -> int | None:
    """Id of a process of this machine that has the file open."""
    real = os.path.realpath(path)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # ended meanwhile, or another user's
            if any(file.path == real for file in process.open_files()):
                return process.pid
    return None
