"""Threads that never keep the interpreter from ending: one for each function, or one for many, or for an event loop."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar


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


T = TypeVar("T")


class LoopThread:
    """Runs coroutines on an event loop whose daemon thread starts with the first coroutine. Thread-safe.

    It ends with `close`, with this object, or with the interpreter; a later `submit` starts a new one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._running: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
        """One loop at most. A list, because the finalizer must share it without referring to this object."""
        weakref.finalize(self, _stop, self._running)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine. Wait for its future on another thread only."""
        with self._lock:
            if not self._running or not self._running[0][1].is_alive():
                loop = asyncio.new_event_loop()
                # The executor of asyncio delays the end of the interpreter until `asyncio.to_thread` has finished.
                loop.set_default_executor(DaemonThreads(f"{self._name}-thread"))
                thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
                thread.start()
                self._running[:] = [(loop, thread)]
            return asyncio.run_coroutine_threadsafe(coroutine, self._running[0][0])

    def close(self) -> None:
        """Cancels the coroutines that still run and ends the thread. May be called any number of times."""
        # Outside the lock: a callback of a cancelled future may submit again, on the thread that this waits for.
        with self._lock:
            running, self._running[:] = list(self._running), []
        _stop(running)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


def _stop(running: list[tuple[asyncio.AbstractEventLoop, threading.Thread]]) -> None:
    while running:
        loop, thread = running.pop()
        if thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)


USER_LOOP = LoopThread("async-functions")
"""Runs all async reward functions, tools and environments of the process, so that they can share a client. It stays
open between calls and trainers, since a client belongs to the loop of its first request."""
