"""One event loop on a thread of its own, for asynchronous reward functions and tools."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on a daemon thread that starts when first needed.

    The loop lives on between calls, so that a reward function can keep a client session open. It ends with `close`,
    with this object, or with the interpreter; a later `submit` starts a new one. Thread-safe.
    """

    def __init__(self, name: str = "reward-loop") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._running: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
        self._finalizer = weakref.finalize(self, _stop, self._running)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; the future is to be waited for on another thread."""
        with self._lock:
            if not self._running or not self._running[0][1].is_alive():
                self._running.clear()
                self._running.append(_start(self._name))
            return asyncio.run_coroutine_threadsafe(coroutine, self._running[0][0])

    def close(self) -> None:
        """Cancel what still runs and end the thread. May be called any number of times."""
        with self._lock:
            _stop(self._running)

    def abandon(self, tasks: Collection[asyncio.Task[Any]] = ()) -> None:
        """Have the thread end when these of its tasks have, and do not wait for it: for a loop that seems blocked."""
        with self._lock:
            for loop, thread in self._running:
                if thread.is_alive():
                    asyncio.run_coroutine_threadsafe(_end_after(tasks), loop)
            self._running.clear()


def _start(name: str) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run, args=(loop,), name=name, daemon=True)
    thread.start()
    return loop, thread


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


async def _end_after(tasks: Collection[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
    asyncio.get_running_loop().stop()


def _stop(running: list[tuple[asyncio.AbstractEventLoop, threading.Thread]]) -> None:
    while running:
        loop, thread = running.pop()
        if thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
