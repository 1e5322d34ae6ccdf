"""Asyncio event loops on daemon threads, and the one on which all async functions of the user run."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from groupgrad.concurrency.daemon_threads import DaemonThreads

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
