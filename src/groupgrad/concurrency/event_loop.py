"""An asyncio event loop on a daemon thread, for async reward functions, tools and environments."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on an event loop whose daemon thread starts with the first coroutine. Thread-safe.

    The loop stays open between calls, so that a reward function can keep a client session. It ends with `close`, with
    this object, or with the interpreter; a later `submit` starts a new one.
    """

    def __init__(self, name: str = "reward-loop") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._running: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
        """One loop at most. A list, because the finalizer must share it without referring to this object."""
        weakref.finalize(self, _stop, self._running)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop. Wait for the future on another thread only."""
        with self._lock:
            if not self._running or not self._running[0][1].is_alive():
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
                thread.start()
                self._running[:] = [(loop, thread)]
            return asyncio.run_coroutine_threadsafe(coroutine, self._running[0][0])

    def close(self) -> None:
        """Cancels the coroutines that still run and ends the thread. May be called any number of times."""
        # Outside the lock: a callback of a cancelled future may submit again, on the thread that this waits for.
        _stop(self._take())

    def abandon(self, tasks: Collection[asyncio.Task[Any]] = ()) -> None:
        """Ends a loop that seems blocked, without waiting for it; the loop first waits for its `tasks`."""
        for loop, thread in self._take():
            if thread.is_alive():
                asyncio.run_coroutine_threadsafe(_stop_after(tasks), loop)

    def _take(self) -> list[tuple[asyncio.AbstractEventLoop, threading.Thread]]:
        with self._lock:
            running, self._running[:] = list(self._running), []
            return running


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


async def _stop_after(tasks: Collection[asyncio.Task[Any]]) -> None:
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
