"""Bounds the wait for an extension of torch, such as DeepSpeed's, while this process or another one compiles it.

The process that compiles an extension keeps a file `lock` open beside it, and other processes wait until that file is
gone. A process that is killed meanwhile leaves the file, and torch would wait for it forever without a message.

A compilation may take longer than the watchdog's timeout. It therefore counts as alive while compilers compute; when
they no longer compute, the watchdog ends the run and names the lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack, suppress

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
BUSY_SHARE = 0.05
"""Share of a core from which on compilers count as computing. Other children of a trainer may wake now and then."""

_try_acquire, _release = FileBaton.try_acquire, FileBaton.release


def bound_waits() -> None:
    """Makes torch's compilations and the waits for them, in this process, report to the watchdog; bounds the waits."""
    FileBaton.wait, FileBaton.try_acquire, FileBaton.release = _wait, _begin, _end


def _wait(self: FileBaton) -> None:
    """Returns when the baton's lock file is gone; RuntimeError if its owner has left it behind."""
    path, holder = str(self.lock_file_path), None

    def details() -> str:
        return f"{path}, " + ("no process has it open" if holder is None else f"process {holder} compiles it")

    began = unheld_since = time.monotonic()
    is_told = False
    compilers = Compilers()
    with activity.doing("waiting for an extension of torch", details):
        while (last_change := _last_change(path)) is not None:
            holder, now = _holder(path), time.monotonic()
            if holder is not None:
                unheld_since = now
            if holder is None or compilers.have_computed(holder):
                activity.sign_of_life()  # without a holder the error below ends this wait, so the watchdog need not
            _check_left_behind(path, now - unheld_since, time.time() - last_change)
            if now - began >= NOTE_S and not is_told:
                is_told = True
                _tell(path, holder)
            time.sleep(POLL_S)


def _begin(self: FileBaton) -> bool:
    """Takes the lock, unless another process has it; until `_end` this process compiles."""
    if not _try_acquire(self):
        return False
    path, has_ended = str(self.lock_file_path), threading.Event()

    def show_life() -> None:
        compilers = Compilers()
        while not has_ended.wait(POLL_S):
            if compilers.have_computed(os.getpid()):
                activity.sign_of_life()

    stack = ExitStack()
    stack.enter_context(activity.doing("compiling an extension of torch", lambda: path))
    stack.callback(has_ended.set)
    threading.Thread(target=show_life, name="groupgrad-compilers", daemon=True).start()
    self.__dict__["compilation"] = stack
    return True


def _end(self: FileBaton) -> None:
    """Gives the lock back."""
    self.__dict__.pop("compilation", ExitStack()).close()
    _release(self)


class Compilers:
    """The processes that a compiling process has started, and the time that they have computed."""

    def __init__(self) -> None:
        self._before: tuple[int, float, float] | None = None
        """Id of the compiling process, time of the last look, and seconds that its children had computed."""

    def have_computed(self, process_id: int) -> bool:
        """True if they have computed since the last call, or if this is the first one for this process."""
        before, now, computed = self._before, time.monotonic(), _computed_by_children(process_id)
        self._before = process_id, now, computed
        if before is None or before[0] != process_id:
            return True
        return computed - before[2] >= BUSY_SHARE * (now - before[1])


def _computed_by_children(process_id: int) -> float:
    """Seconds of processor time of a process's descendants, ended ones included."""
    total = 0.0
    with suppress(psutil.Error, OSError):
        process = psutil.Process(process_id)
        times = process.cpu_times()
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        for child in process.children(recursive=True):
            with suppress(psutil.Error, OSError):  # ended meanwhile
                total += sum(child.cpu_times()[:4])
    return total


def _check_left_behind(path: str, unheld_s: float, quiet_s: float) -> None:
    """RuntimeError for a lock that no process has open, beside files that have not changed for long."""
    if unheld_s >= CONFIRM_S and quiet_s > QUIET_S:
        raise RuntimeError(
            f"the file {path} says that a process compiles an extension of torch there, but no process of this "
            f"machine has it open, and nothing in its folder has changed for {quiet_s:.0f} s: a process that was "
            "killed has left it, and every run would wait for it; delete the file and start again"
        )


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
