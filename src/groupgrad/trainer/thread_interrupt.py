"""Raises an error in the training thread from another thread."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from groupgrad import stopping

logger = logging.getLogger(__name__)

_SIGNAL: Any = getattr(signal, "SIGUSR2", None)


class ThreadInterrupt:
    """Raises errors in the thread that enters it: by a signal on the main thread, which also ends a call of the system.

    A thread inside C++ meets the error when it returns to Python.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._watched = threading.current_thread()
        self._old_handler: Any = None
        self._has_handler = False

    def __enter__(self) -> ThreadInterrupt:
        self._watched = threading.current_thread()
        if _SIGNAL is not None and self._watched is threading.main_thread():
            self._old_handler = signal.signal(_SIGNAL, self._raise)
            self._has_handler = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._error = None
        if self._has_handler:
            signal.signal(_SIGNAL, signal.SIG_DFL if self._old_handler is None else self._old_handler)
            self._has_handler = False

    def throw(self, error: BaseException) -> None:
        """Raises `error`, whose class takes one message, in the thread that entered. For any other thread."""
        thread = self._watched.ident or 0
        if self._has_handler:
            self._error = error
            signal.pthread_kill(thread, _SIGNAL)
            return
        kind, message = type(error), str(error)
        raised = type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, message)})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(raised))

    def _raise(self, number: int, frame: FrameType | None) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        if callable(self._old_handler):
            self._old_handler(number, frame)
        elif self._old_handler == signal.SIG_DFL:
            stopping.pass_on(number)


def write_stacks(path: Path, message: str) -> None:
    """Writes a message and the Python stacks of all threads, of those inside C++ too. A warning if it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(f"{message}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
