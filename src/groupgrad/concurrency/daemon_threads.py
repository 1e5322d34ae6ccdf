"""Threads that never keep the interpreter from ending: one for each function, or one for many."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class DaemonThreads(ThreadPoolExecutor):
    """Runs each function on a daemon thread of its own, so that none waits for one that hangs.

    A subclass of ThreadPoolExecutor, whose own threads are never started, because event loops accept no other default
    executor.
    """

    def __init__(self, name: str):
        super().__init__(1)
        self._name = name

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts `fn`. RuntimeError if the system has no more threads."""
        future: Future[Any] = Future()
        work = future, functools.partial(fn, *args, **kwargs)
        threading.Thread(target=_answer, args=work, name=self._name, daemon=True).start()
        return future


class DedicatedThread:
    """Runs functions one after another on one daemon thread of its own, which ends when this object is dropped.

    For objects that work on one thread only, such as connections of sqlite3. The thread starts with the first function.
    """

    def __init__(self, name: str):
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_started = False
        self._num_open = 0
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts `fn` after the functions before it. RuntimeError if the system has no more threads."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._has_started:
                threading.Thread(target=_run_all, args=(self._work,), name=self._name, daemon=True).start()
                self._has_started = True
            self._num_open += 1
        self._work.put(functools.partial(_answer, future, functools.partial(fn, *args, **kwargs), self._end_function))
        return future

    @property
    def is_busy(self) -> bool:
        """True while a function runs or waits."""
        with self._lock:
            return self._num_open > 0

    def _end_function(self) -> None:
        with self._lock:
            self._num_open -= 1

    def __del__(self) -> None:
        self._work.put(None)


def _run_all(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Runs queued functions until it takes None from the queue."""
    while (function := work.get()) is not None:
        function()
        del function  # a waiting thread keeps nothing alive


def _answer(future: Future[Any], function: Callable[[], Any], end: Callable[[], None] = lambda: None) -> None:
    """Runs `function`, calls `end`, and gives the future the result, whose reader may submit again at once."""
    result = error = None
    is_wanted = future.set_running_or_notify_cancel()
    try:
        result = function() if is_wanted else None
    except BaseException as raised:  # SystemExit in a tool ends the tool, not the thread
        error = raised
    end()
    if error is not None:
        future.set_exception(error)
    elif is_wanted:
        future.set_result(result)
