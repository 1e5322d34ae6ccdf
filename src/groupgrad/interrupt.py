"""Raises an error in a thread from outside of it: at the deadline of a call, or when a watch ends a run.

On the main thread the signal SIGVTALRM brings the error, which also ends a blocking call of the system. A timer sends
the same signal after some computing time, for code that keeps Python's lock but checks for signals, as a regular
expression does: no other thread of Python can run then. Other threads meet the error when they return to Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_started: list[Interrupt] = []
"""The interrupts of the main thread, the outermost first."""
_timer_lock = threading.RLock()
"""Held while the timer is set by what is in `_started`. A handler may set it again, so the lock is reentrant."""


class Interrupt:
    """Raises the error that `due` returns in the thread that starts it; None is no error.

    `due` is called when another thread asks for it (`throw`) and when the computing time set by `ask_after` is over. On
    the main thread it may also be called at other times, since the interrupts there share one signal.
    """

    def __init__(self, due: Callable[[], BaseException | None]):
        self._due = due
        self._cpu_s = math.inf
        self._before: Any = None
        """The handler that the signal had before, for the interrupt that is started first."""
        self._thread = 0
        self._by_signal = False
        self._has_sent = False
        """An error was sent to a thread that is not the main one."""
        self._is_over = True
        self._lock = threading.Lock()
        """Held while the error is sent, so that nothing is sent after the end."""

    def start(self) -> None:
        """Chooses the present thread."""
        self._thread, self._is_over = threading.get_ident(), False
        self._by_signal = threading.current_thread() is threading.main_thread()
        if self._by_signal:
            if not _started:
                self._before = signal.signal(signal.SIGVTALRM, _raise_due)
            _started.append(self)

    def end(self) -> None:
        """Restores handler and timer; nothing is raised later. A second call changes nothing."""
        self._is_over = True
        with self._lock:
            has_sent, self._has_sent = self._has_sent, False
        if has_sent:
            _take_back(self._thread)
        if self in _started:
            with _timer_lock:
                _started.remove(self)
                _set_timer()
            if not _started:
                signal.signal(signal.SIGVTALRM, signal.SIG_DFL if self._before is None else self._before)

    def throw(self) -> None:
        """Raises the error if there is one. For any other thread."""
        with self._lock:
            if self._is_over:
                return
            if self._by_signal:
                signal.pthread_kill(self._thread, signal.SIGVTALRM)
                return
            error = self._due()
            if error is not None:
                kind, args = type(error), error.args
                raised = type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *args)})
                self._has_sent = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(raised))

    def ask_after(self, cpu_s: float) -> None:
        """Calls `due` after this much computing time of the process, unless this is called again before."""
        with _timer_lock:
            self._cpu_s = cpu_s
            _set_timer()


class _Nothing(BaseException):
    """Takes the place of an error that is not to arrive."""


def _take_back(thread: int) -> None:
    """Takes back an error that was sent to the present thread and may not have arrived.

    Another error replaces it and is caught here. Without one, Python up to 3.12 goes on asking all threads to look for
    an error, which slows them down, and keeps those that are traced (by a debugger or coverage) from their next line.
    """
    with contextlib.suppress(_Nothing):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Nothing))
        while True:  # it arrives at the jump back, if not before
            pass


def _set_timer() -> None:
    """Starts the timer anew for the interrupt that needs it first."""
    seconds = min((interrupt._cpu_s for interrupt in _started), default=math.inf)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0 if seconds == math.inf else seconds)


def _raise_due(number: int, frame: FrameType | None) -> None:
    """The signal's handler. The end of a run comes before that of a call in it."""
    if not _is_starting_or_ending(frame):
        for interrupt in _started:
            error = interrupt._due()
            if error is not None:
                raise error
    with _timer_lock:
        _set_timer()


def _is_starting_or_ending(frame: FrameType | None) -> bool:
    """True in a call that an error would keep from what it has to do."""
    while frame is not None:
        if frame.f_code in (Interrupt.start.__code__, Interrupt.end.__code__):
            return True
        frame = frame.f_back
    return False
