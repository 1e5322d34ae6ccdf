"""Ends a run at a signal: signals are received at any time and handled at points where no work is lost.

SIGTERM, SIGUSR1, SIGHUP and the first SIGINT ask for the end of the run. Work that only this rank takes part in, such
as sampling and rewards, is left at once (`interruptible`); anything else is finished first (`finishing`).
`dist.errors_on_all_ranks` surrounds the former and carries the request to all ranks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
"""Signals that end a run after a checkpoint; a second SIGINT ends it at once.

SIGHUP is sent when the terminal closes. It stays ignored in a run that `nohup` has started.
"""

EXIT_STOPPED = 75
"""Exit code of a run that a signal has stopped and that can go on: "try again" of sysexits.h (EX_TEMPFAIL)."""

EXIT_INTERRUPTED = 130
"""Exit code after SIGINT, as shells give it."""

ECHO_S = 2.0
"""Time in which a second SIGINT is the first one, passed on by torchrun."""


class StopRequested(BaseException):
    """Work of this rank was left because a signal asks for the end of the run; the text is the signal's name."""


class Stopped(SystemExit):
    """Training was stopped by a signal, after a checkpoint. Its `code` is the exit code of the process.

    It ends a script that does not catch it: the steps of the run were not all made.
    """

    def __init__(self, name: str, message: str):
        super().__init__(EXIT_INTERRUPTED if name == "SIGINT" else EXIT_STOPPED)
        self.message = message

    def __str__(self) -> str:
        return self.message


PAUSE = "a pause"
"""Stands for the name of a signal where a run pauses at a step that its owner has set."""


class Paused(Stopped):
    """Training has paused at a step that was asked for, after a checkpoint, and can be resumed from there."""

    def __init__(self, step: int, max_steps: int):
        super().__init__(PAUSE, f"the run paused after step {step} of {max_steps}")
        self.step, self.max_steps = step, max_steps


class _Request:
    """The request that signals have made of this process."""

    def __init__(self) -> None:
        self.is_active = False
        self.process = os.getpid()
        self.num_interrupts = 0
        self.name: str | None = None
        self.came_at = 0.0
        self.num_interruptible = 0
        self.leaves_work = True
        """Work is left at once; otherwise the end of the step is waited for."""


_request = _Request()


def requested() -> str | None:
    """Name of the signal that asked for the end of the run; None if there was none."""
    return _request.name


def is_receiving() -> bool:
    """True while `received_signals` is entered."""
    return _request.is_active


@contextmanager
def interruptible() -> Iterator[None]:
    """Work that may be left at any point when a signal comes: StopRequested, also for a signal that came before.

    The body contains no collective, and leaves nothing behind that a checkpoint needs.
    """
    _request.num_interruptible += 1
    try:
        if _request.name is not None and _request.leaves_work:
            raise StopRequested(_request.name)
        yield
    finally:
        _request.num_interruptible -= 1


@contextmanager
def finishing() -> Iterator[None]:
    """Work that is finished even if a signal comes, such as a checkpoint."""
    before, _request.leaves_work = _request.leaves_work, False
    try:
        yield
    finally:
        _request.leaves_work = before


@contextmanager
def received_signals(*, ignored: tuple[str, ...] = (), leaves_work: bool = True) -> Iterator[None]:
    """Receives `SIGNALS`, but those `ignored`, while the body runs on the main thread; on another thread, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in SIGNALS if name not in ignored]
    numbers = [number for number in numbers if not _is_of_nohup(number)]
    before: dict[int, Any] = {}
    _request.name, _request.num_interruptible, _request.leaves_work = None, 0, leaves_work
    _request.num_interrupts, _request.is_active, _request.process = 0, True, os.getpid()
    try:
        for number in numbers:
            before[number] = signal.signal(number, _receive)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _request.name, _request.is_active = None, False


def _is_of_nohup(number: int) -> bool:
    return signal.Signals(number).name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN


def _receive(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _request.process:  # a process that was forked while training ends as it would otherwise
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    name = signal.Signals(number).name
    is_first, _request.name = _request.name is None, _request.name or name
    _request.num_interrupts += name == "SIGINT"
    if is_first:
        _request.came_at = time.monotonic()
    elif name == "SIGINT" and _request.num_interrupts > 1:
        # The launcher passes on the interrupt that the terminal has sent to its processes already.
        if "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - _request.came_at < ECHO_S:
            return
        raise KeyboardInterrupt
    if is_first and _request.num_interruptible and _request.leaves_work:
        raise StopRequested(name)
