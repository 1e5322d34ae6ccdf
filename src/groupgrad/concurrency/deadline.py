"""Interrupts a call on this thread at a deadline, for calls that cannot run in a process of their own."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from groupgrad.activity import end_process
from groupgrad.concurrency.running_time import RunningTime

REACTION_S = 8.0
"""Time that a call has to end once it is interrupted, before its process is ended."""

TICK_S = 0.25
"""Time between two looks at the clock."""

_SIGNALS: tuple[Any, ...] = tuple(getattr(signal, name) for name in ("SIGUSR2", "SIGPROF") if hasattr(signal, name))

T = TypeVar("T")


class DeadlinePassed(BaseException):
    """Raised in a call at its deadline; no `except Exception` takes it for its own."""


def call_within(seconds: float, call: Callable[[], T], message: str) -> T:
    """Returns what the call returns; raises DeadlinePassed in it after `seconds`.

    On the main thread a signal interrupts blocking calls; a CPU-time timer interrupts code that holds the GIL but
    checks for signals, such as a regular expression. On other threads the exception is raised when the call returns to
    Python. If the call has not ended `REACTION_S` seconds after the deadline, the process exits with `message` and code
    70. Time in which the process is suspended does not count.
    """
    deadline = _Deadline(seconds, message)
    try:
        try:
            deadline.start()
            return call()
        finally:
            deadline.end()
    finally:  # on another thread the exception may come at the first instruction of the first `end`
        deadline.end()


class _Deadline:
    def __init__(self, seconds: float, message: str):
        self._seconds, self._message = seconds, message
        self._thread = threading.get_ident()
        self._time = RunningTime()
        self._is_over = False
        self._is_own_signal = False
        self._is_exception_sent = False
        self._done = threading.Event()
        self._lock = threading.Lock()
        """Held while the call is interrupted, so that nothing is sent to this thread after the end."""
        self._handlers: dict[int, Any] = {}

    def start(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._handlers[number] = signal.getsignal(number)
                signal.signal(number, self._interrupt)
            self._start_timer()
        threading.Thread(target=self._watch, name="reward-deadline", daemon=True).start()

    def end(self) -> None:
        """Puts handlers and timers back as they were; a second call changes nothing."""
        self._is_over = True
        self._done.set()
        with self._lock:
            if self._is_exception_sent:
                self._is_exception_sent = False
                try:
                    for _ in range(10):  # an exception that is still on its way arrives in a loop
                        pass
                except DeadlinePassed:
                    pass
        if self._handlers:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _watch(self) -> None:
        seconds = 0.0
        while (left_s := self._seconds - seconds) > 0:
            if self._done.wait(min(left_s, TICK_S)):
                return
            seconds = self._time.tick()
        interrupted_at = float("-inf")
        while (seconds := self._time.tick()) < self._seconds + REACTION_S:
            if seconds > interrupted_at + 1.0:  # a bare `except` may swallow the first ones
                interrupted_at = seconds
                if not self._send():
                    return
            if self._done.wait(TICK_S):
                return
        end_process(self._message)

    def _send(self) -> bool:
        """Interrupts the call; False if it has ended."""
        with self._lock:
            if self._is_over:
                return False
            if self._handlers:
                self._is_own_signal = True
                signal.pthread_kill(self._thread, signal.SIGUSR2)
            else:
                self._is_exception_sent = True
                error = ctypes.py_object(DeadlinePassed)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), error)
            return True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        is_own = self._is_own_signal if number == signal.SIGUSR2 else True
        self._is_own_signal = False
        if not is_own:
            handler = self._handlers.get(number)
            if callable(handler):  # the watchdog's
                handler(number, frame)
        elif not self._is_over and not self._is_in(frame):
            if self._time.seconds() >= self._seconds:
                raise DeadlinePassed
            self._start_timer()

    def _is_in(self, frame: FrameType | None) -> bool:
        """True while this object starts or ends, where the exception would keep it from what it has to do."""
        while frame is not None:
            if frame.f_code in (_Deadline.start.__code__, _Deadline.end.__code__):
                return True
            frame = frame.f_back
        return False

    def _start_timer(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, max(self._seconds - self._time.seconds(), 0.0) + 1.0)
