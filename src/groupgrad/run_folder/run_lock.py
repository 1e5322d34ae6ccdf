"""A lock on the folder of a run, so that two runs do not write into each other's checkpoints."""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from groupgrad.errors import OutputDirInUse
from groupgrad.run_folder.run_files import LOCK_OWNER

logger = logging.getLogger(__name__)

LOCK = ".groupgrad.lock"
"""File in `output_dir` that is locked while a run trains; the system unlocks it when the process ends."""


@contextmanager
def locked(output_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the lock of a run's folder during the body. OutputDirInUse, with the owner's name, if a run has it.

    The lock of a process that has ended counts for nothing. A file system without locks gives a warning.
    """
    folder = Path(output_dir)
    lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        owner = _owner(folder)
        if owner is None or not _has_ended(owner):
            raise OutputDirInUse(_message(folder, owner)) from None
        logger.warning("%s was left locked by a process that has ended, so this run takes it over", folder)
    except (OSError, NotImplementedError) as error:
        logger.warning("%s cannot be locked (%s): see to it that no other run uses it", folder, error)
    try:
        _write_owner(folder)
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                (folder / LOCK_OWNER).unlink(missing_ok=True)
            lock.release()


def is_trained(folder: Path) -> bool:
    """True if a process of this machine trains the run or the sweep in a folder."""
    owner = _owner(folder)
    return owner is not None and owner["host"] == socket.gethostname() and psutil.pid_exists(int(owner["pid"]))


def _write_owner(folder: Path) -> None:
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    try:
        (folder / LOCK_OWNER).write_text(json.dumps(owner) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written: %s", folder / LOCK_OWNER, error)


def _owner(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):  # the run has just begun or ended
        return json.loads((folder / LOCK_OWNER).read_text())
    return None


def _has_ended(owner: dict[str, Any]) -> bool:
    """True if the owner's process ran on this machine and has ended, though a child of it may still hold the lock."""
    return owner["host"] == socket.gethostname() and not psutil.pid_exists(int(owner["pid"]))


def _message(folder: Path, owner: dict[str, Any] | None) -> str:
    who = "another run"
    if owner is not None:
        who = f"a run that process {owner['pid']} on {owner['host']} began at {owner['started']}"
    return (
        f"output_dir={str(folder)!r} is in use by {who}, and the checkpoints of two runs would mix; wait for its end, "
        "or set another output_dir"
    )
