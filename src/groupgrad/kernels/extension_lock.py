"""Bounds the wait for an extension of torch, such as DeepSpeed's, while another process compiles it.

The process that compiles an extension makes a file `lock` beside it, and other processes wait until that file is gone.
A process that is killed meanwhile leaves the file, and torch would wait for it forever.
"""

from __future__ import annotations

import logging
import os
import time

from torch.utils.file_baton import FileBaton

from groupgrad import activity

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks at a lock."""
LEFT_S = 1800.0
"""Age in seconds from which on a lock counts as left behind; a compilation takes minutes."""


def bound_waits() -> None:
    """Makes waits of this process for extensions of torch report to the watchdog, and end."""
    FileBaton.wait = _wait


def _wait(self: FileBaton) -> None:
    """Returns when the baton's lock file is gone; RuntimeError if its owner has left it behind."""
    path = str(self.lock_file_path)
    logger.warning("waiting for an extension of torch that another process compiles: %s", path)
    with activity.doing("waiting for an extension of torch", lambda: path):
        try:
            while time.time() - os.stat(path).st_mtime < LEFT_S:
                time.sleep(POLL_S)
        except FileNotFoundError:
            return
    raise RuntimeError(
        f"the file {path} says that a process compiles an extension of torch, and is {LEFT_S / 60:.0f} minutes old or "
        "older: a process that was killed has left it, and every run would wait for it; delete the file and start again"
    )
