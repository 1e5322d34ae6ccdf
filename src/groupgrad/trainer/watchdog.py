"""Ends a run that hangs: says what runs for long, and after a deadline writes all stacks and raises an error.

A thread looks at the activity of the training thread (`activity.py`). The error is raised in the training thread, so
that it passes through `dist.errors_on_all_ranks` and ends the other ranks too. A thread that does not react is ended
with its process. Where the training thread keeps Python's lock, as a regular expression does, a timer over the
process's computing time has the system raise the error in its place.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from os import _exit
from pathlib import Path
from types import FrameType
from typing import Any

from groupgrad import activity, dist, stopping
from groupgrad.activity import Hung

logger = logging.getLogger(__name__)

FIRST_NOTE_S = 60.0
"""Silence after which a message says what is running; the next ones come after twice the time each."""

REACTION_S = 8.0
"""Time that the training thread has to raise the error before its process is ended."""

EXIT_HUNG = 70
"""Exit code of a process that is ended since it hangs: "internal software error" of sysexits.h (EX_SOFTWARE)."""

_SIGNAL: Any = getattr(signal, "SIGUSR2", None)


class Watchdog:
    """Watches the thread that enters it. `timeout_s` is the longest silence of one activity; None watches nothing.

    `step` gives the number of the optimizer step in progress, for messages.
    """

    def __init__(self, folder: str | Path, step: Callable[[], int], timeout_s: float | None):
        self._folder, self._step, self._timeout_s = Path(folder), step, timeout_s
        self._closed = threading.Event()
        self._error: Hung | None = None
        self._thread: threading.Thread | None = None
        self._watched = threading.current_thread()
        self._old_handlers: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Watchdog:
        if self._timeout_s is None:
            return self
        self._watched = threading.current_thread()
        self._process = os.getpid()
        if self._uses_signal:
            self._old_handlers = {
                _SIGNAL: signal.signal(_SIGNAL, self._raise),
                signal.SIGVTALRM: signal.signal(signal.SIGVTALRM, self._raise_in_frozen),
            }
        activity.sign_of_life()
        self._restart_timer()
        self._thread = threading.Thread(target=self._run, name="groupgrad-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is None:
            return
        self._closed.set()
        self._thread.join()
        if self._old_handlers:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        for number, handler in self._old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def _uses_signal(self) -> bool:
        return _SIGNAL is not None and self._watched is threading.main_thread()

    def _run(self) -> None:
        assert self._timeout_s is not None
        next_note_s = FIRST_NOTE_S
        tick_s = min(1.0, self._timeout_s / 4)
        ticked_at, computed_s = time.monotonic(), time.process_time()
        while not self._closed.wait(tick_s):
            self._restart_timer()
            now, computed = time.monotonic(), time.process_time()
            late_s = now - ticked_at - tick_s
            if late_s > self._timeout_s / 2 and computed - computed_s < late_s / 2:  # the process was suspended
                activity.sign_of_life()
            ticked_at, computed_s = now, computed
            present, silent_s = activity.present()
            if present is None or silent_s < FIRST_NOTE_S:
                next_note_s = FIRST_NOTE_S
            if present is None:
                continue
            # The rank that is waited for is the one to say what hangs.
            if silent_s >= self._timeout_s + (REACTION_S + 2 if present.what == activity.WAITING else 0):
                self._end(present, silent_s)
                continue
            if silent_s >= next_note_s:
                logger.warning("%s", self._text(present, silent_s))
                next_note_s *= 2

    def _restart_timer(self) -> None:
        """Has the timer expire if this is not called again within the timeout's computing time."""
        if self._old_handlers and self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._timeout_s + REACTION_S)

    def _text(self, present: activity.Activity, silent_s: float) -> str:
        details = present.details()
        place = f"step {self._step()}, rank {dist.rank()}{f', {details}' if details else ''}"
        return f"{present.what} has run for {silent_s:.0f} s ({place})"

    def _end(self, present: activity.Activity, silent_s: float) -> None:
        """Writes the stacks, raises the error in the watched thread, and ends the process if that has no effect."""
        path = self._folder / f"hang_step_{self._step():06d}_rank_{dist.rank()}.txt"
        text = self._text(present, silent_s)
        message = (
            f"{text}, longer than hang_timeout_s={self._timeout_s:g} allows; what each thread does is in {path}. Give "
            "it a deadline of its own, or raise hang_timeout_s (None: no limit)"
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                file.write(f"{message}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)
        self._error = Hung(message)
        if self._uses_signal and self._watched.ident is not None:
            signal.pthread_kill(self._watched.ident, _SIGNAL)
        else:
            raised = type("Hung", (Hung,), {"__init__": lambda self: Hung.__init__(self, message)})
            thread = ctypes.c_ulong(self._watched.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(raised))
        if not self._closed.wait(REACTION_S) and activity.present()[0] is present:
            print(f"groupgrad: error: {message}", file=sys.stderr, flush=True)
            _exit(EXIT_HUNG)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._pass_on(number, frame)

    def _raise_in_frozen(self, number: int, frame: FrameType | None) -> None:
        present, silent_s = activity.present()
        if self._timeout_s is None or present is None or silent_s < self._timeout_s or os.getpid() != self._process:
            self._pass_on(number, frame)
            return
        raise Hung(f"{self._text(present, silent_s)} without a pause in which another thread of Python could run")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Does what the signal would have done without the watchdog."""
        handler = self._old_handlers.get(number)
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL and number == _SIGNAL:
            stopping.pass_on(number)
