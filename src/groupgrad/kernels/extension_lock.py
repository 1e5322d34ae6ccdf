"""Bounds the wait for an extension of torch, such as DeepSpeed's, while another process compiles it.

The process that compiles an extension keeps a file `lock` open beside it, and other processes wait until that file is
gone. A process that is killed meanwhile leaves the file, and torch would wait for it forever without a message.
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
LEFT_S = 600.0
"""Seconds without a process of this machine that has the lock open, after which it counts as left behind. A process of
another machine cannot be seen, and compiles for minutes."""


def bound_waits() -> None:
    """Makes waits of this process for extensions of torch report to the watchdog, and end."""
    FileBaton.wait = _wait


def _wait(self: FileBaton) -> None:
    """Returns when the baton's lock file is gone; RuntimeError if its owner has left it behind."""
    path, holder = str(self.lock_file_path), None

    def details() -> str:
        return f"{path}, " + ("no process has it open" if holder is None else f"process {holder} compiles it")

    began = unheld_since = time.monotonic()
    is_told = False
    with activity.doing("waiting for an extension of torch", details):
        while os.path.exists(path):
            holder, now = _holder(path), time.monotonic()
            if holder is not None:
                unheld_since = now
            if now - unheld_since >= LEFT_S:
                raise RuntimeError(
                    f"the file {path} says that a process compiles an extension of torch, but no process of this "
                    f"machine has had it open for {LEFT_S:.0f} s: a process that was killed has left it, and every run "
                    "would wait for it; delete the file and start again"
                )
            if now - began >= NOTE_S and not is_told:
                is_told = True
                logger.warning("waiting for an extension of torch that another process compiles: %s", details())
            time.sleep(POLL_S)


def _holder(path: str) -> int | None:
    """Id of a process of this machine that has the file open."""
    real = os.path.realpath(path)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # ended meanwhile, or another user's
            if any(file.path == real for file in process.open_files()):
                return process.pid
    return None
