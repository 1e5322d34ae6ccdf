"""Kills this process if one of its threads holds the GIL for too long, so that no other thread can act.

A second process, which runs this file as a script, does so. System timers would not do: they count the time in which
this process is suspended, and would kill it as soon as it resumes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

TICK_S = 0.5
"""Longest wait of the second process; one that takes more than twice as long counts as twice as long."""

STACKS_S = 1.0
"""Time for the process to write its stacks before it is killed."""

_STACKS_SIGNAL = getattr(signal, "SIGIO", None)
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTSTP")


class LockGuard:
    """Starts the second process with the first deadline, and another one in a fork of this process. Thread-safe."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        """Identify deadlines."""
        self._start_anew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def set(self, number: int, seconds: float, message: str) -> None:
        """Kills the process after `seconds`, with the message and its stacks, unless this is called again before.

        Zero takes the deadline back.
        """
        if not hasattr(os, "set_blocking"):
            return
        line = json.dumps([number, seconds, message[:1000]]).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                if seconds <= 0:
                    return
                self._process = _started()
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended, or has not read for long
                os.write(self._process.stdin.fileno(), line)


def _started() -> subprocess.Popen[bytes]:
    if _STACKS_SIGNAL is not None and sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, OSError):  # stderr may be no real file
            faulthandler.register(_STACKS_SIGNAL, file=sys.__stderr__, all_threads=True)
    command = [sys.executable, __file__, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def watch(parent: int) -> None:
    """Main loop of the second process, until its parent ends."""
    import psutil

    for name in _IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    watched = psutil.Process(parent)
    left_s: dict[int, float] = {}
    messages: dict[int, str] = {}
    unread = b""
    while os.getppid() == parent:
        began = time.monotonic()
        if select.select([0], [], [], TICK_S)[0]:
            received = os.read(0, 2**16)
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            for number, seconds, message in map(json.loads, lines):
                left_s.pop(number, None)
                messages.pop(number, None)
                if seconds > 0:
                    left_s[number], messages[number] = seconds, message
        waited_s = min(time.monotonic() - began, 2 * TICK_S)
        if watched.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            continue
        for number in left_s:
            left_s[number] -= waited_s
            if left_s[number] <= 0:
                _end(parent, messages[number])
                return


def _end(parent: int, message: str) -> None:
    print(f"groupgrad: error: {message}; the call keeps Python's lock", file=sys.stderr, flush=True)
    if _STACKS_SIGNAL is not None:
        os.kill(parent, _STACKS_SIGNAL)
        time.sleep(STACKS_S)
    os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
