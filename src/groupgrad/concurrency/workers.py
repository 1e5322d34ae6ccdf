"""Runs users' functions on threads, an event loop or this thread; deadlines of the first two hold if a call hangs."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from groupgrad.concurrency.callables import is_async
from groupgrad.concurrency.daemon_threads import USER_LOOP, DaemonThreads, DedicatedThread, LoopThread

SLICE_S = 0.5
"""Longest single wait. One that takes more than twice as long counts as twice as long."""


def slices(seconds: float | None) -> Iterator[float]:
    """Yields the lengths of waits that together take `seconds`, without end for None.

    The caller waits for each length before it takes the next one.
    """
    left_s = float("inf") if seconds is None else seconds
    while left_s > 0:
        began = time.monotonic()
        yield min(left_s, SLICE_S)
        left_s -= min(time.monotonic() - began, 2 * SLICE_S)


logger = logging.getLogger(__name__)


_MAIN_THREAD_ERRORS = (
    "only works in main thread",
    "There is no current event loop in thread",
    "support threaded environment",
)
"""Parts of the errors of `signal.signal`, `asyncio.get_event_loop` and math-verify on other threads."""
_MAX_ERROR_CHARS = 400
"""Longest text that counts as such an error; a tool may find the same words in a page or in the output of code."""


def needs_main_thread(text: Any) -> bool:
    """True for the text of an error by which a function works on the main thread alone."""
    is_short = isinstance(text, str) and len(text) <= _MAX_ERROR_CHARS
    return is_short and any(part in text for part in _MAIN_THREAD_ERRORS)


class NoAnswer(TimeoutError):
    """A call had not ended by its deadline."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """The result or failure of one call."""

    value: Any = None
    """The function's return value; None if it failed."""
    error: BaseException | None = None
    """The exception that it raised. `NoAnswer` if `timed_out`."""
    timed_out: bool = False
    """True if it had not ended by its deadline. It may still be running."""
    seconds: float = 0.0
    """Seconds since it started running."""


def late(timeout_s: float | None, seconds: float) -> Outcome:
    """The outcome of a call that had not ended after `timeout_s`; it has run for `seconds`."""
    return Outcome(error=NoAnswer(f"no answer within {timeout_s:g} seconds"), timed_out=True, seconds=seconds)


def call_here(call: Callable[[], Any]) -> Outcome:
    """Makes a call on this thread, without a deadline. Raises KeyboardInterrupt and what ends the run."""
    began = time.monotonic()
    try:
        return Outcome(call(), seconds=time.monotonic() - began)
    except (Exception, SystemExit) as error:
        return Outcome(error=error, seconds=time.monotonic() - began)


@dataclass(slots=True, eq=False)
class _Call:
    """One call under way."""

    function: Callable[[], Any]
    is_async: bool
    then: Callable[[Any], Any] | None
    timeout_s: float
    name: str
    thread: DedicatedThread | None = None
    """The thread of a plain function; None: any."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    started: float | None = None
    """`time.monotonic()` when it started running; of an async function when it was given to the event loop."""
    awaitable: Any = None
    """The awaitable that a plain function returned."""
    has_begun: bool = False
    """An event loop has begun to run it."""

    @property
    def seconds(self) -> float:
        return 0.0 if self.started is None else time.monotonic() - self.started

    def run(self) -> Outcome:
        """The outcome of a plain function. An awaitable that it returns is the value, for an event loop to await."""
        try:
            value = self.function()
            if self.then is not None and not inspect.isawaitable(value):
                value = self.then(value)
            return Outcome(value, seconds=self.seconds)
        except BaseException as error:  # SystemExit in a tool ends the tool, not the thread
            return Outcome(error=error, seconds=self.seconds)

    async def run_async(self) -> Outcome:
        """The outcome of an async function, or of the awaitable that a plain one returned."""
        self.has_begun = True
        try:
            value = await (self.function() if self.awaitable is None else self.awaitable)
            return Outcome(value if self.then is None else self.then(value), seconds=self.seconds)
        except BaseException as error:  # SystemExit would end the loop
            return Outcome(error=error, seconds=self.seconds)


class Workers:
    """Runs plain and async functions so that every call is answered by its deadline, whatever the function does.

    Plain functions run on at most `num_threads` daemon threads, async ones on the event loop of the process. Each call
    has a supervisor, a coroutine on another event loop that runs no user code and therefore cannot be blocked:

    - time in which the process is suspended counts for no deadline;
    - a plain function past its deadline is answered as timed out and its thread is no longer counted, so that the pool
      never shrinks;
    - an async function past its deadline is answered and cancelled. While one blocks the event loop, the others wait,
      and are answered at their deadlines too.

    All threads are daemons, so that a hanging function does not keep the interpreter from ending. Thread-safe. Usable
    again after `close`.
    """

    def __init__(self, num_threads: int = 16):
        self._num_threads = num_threads
        self._threads = DaemonThreads("tool-worker")
        self._supervisors = LoopThread("tool-supervisor")
        # The fields below are used on the supervisors' loop only.
        self._free_threads = asyncio.Semaphore(num_threads)
        self._warned: set[str] = set()

    def call(
        self,
        function: Callable[..., Any],
        kwargs: Mapping[str, Any],
        *,
        timeout_s: float | None,
        then: Callable[[Any], Any] | None = None,
        name: str = "",
        thread: DedicatedThread | None = None,
    ) -> Future[Outcome]:
        """Starts `function(**kwargs)`; the future is done by about `timeout_s` seconds after it started running.

        `then` is applied to the return value, on the same thread and within the same deadline. An awaitable that a
        plain function returns is awaited on the event loop. The future never raises and cannot be cancelled: any
        exception of the function, `SystemExit` and `KeyboardInterrupt` too, is the outcome's `error`. The function has
        the caller's context variables. Late calls are warned of by their `name`, if they have one. A plain function
        runs on `thread`, if one is given, after the functions before it.
        """
        run = functools.partial(function, **kwargs)
        limit_s = math.inf if timeout_s is None else timeout_s
        call = _Call(run, is_async(function), then, limit_s, name, thread)
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()

        def answer(ended: Future[Outcome]) -> None:
            error = RuntimeError("its workers were closed") if ended.cancelled() else ended.exception()
            future.set_result(ended.result() if error is None else Outcome(error=error))

        self._supervisors.submit(self._supervise(call)).add_done_callback(answer)
        return future

    def close(self) -> None:
        """Answers every open call with an error and ends the threads. May be called any number of times."""
        self._supervisors.close()
        self._free_threads = asyncio.Semaphore(self._num_threads)  # a semaphore belongs to one loop

    # ---------------------------------------------------------------------- supervisors, on a loop of their own

    async def _supervise(self, call: _Call) -> Outcome:
        if not call.is_async:
            async with self._free_threads:
                outcome = await self._supervise_in_thread(call)
            if not inspect.isawaitable(outcome.value):
                return outcome
            call.awaitable = outcome.value
        return await self._supervise_on_loop(call)

    async def _supervise_in_thread(self, call: _Call) -> Outcome:
        call.started = time.monotonic()
        running = (call.thread or self._threads).submit(call.context.run, call.run)
        ended = asyncio.wrap_future(running)
        try:
            for wait_s in slices(call.timeout_s):
                await asyncio.wait({ended}, timeout=wait_s)
                if running.done():
                    return running.result()
            return self._time_out(call)
        finally:
            if not running.done():
                running.add_done_callback(lambda late: _discard(late.result().value))

    async def _supervise_on_loop(self, call: _Call) -> Outcome:
        call.started = call.started or time.monotonic()
        running = call.context.run(USER_LOOP.submit, call.run_async())
        ended = asyncio.wrap_future(running)
        try:
            for wait_s in slices(call.timeout_s - call.seconds):
                await asyncio.wait({ended}, timeout=wait_s)
                if running.done():
                    return running.result()
            return self._time_out(call)
        finally:
            running.cancel()
            if not call.has_begun:
                _discard(call.awaitable)

    def _time_out(self, call: _Call) -> Outcome:
        if call.name and call.name not in self._warned:
            self._warned.add(call.name)
            has_begun = not call.is_async or call.has_begun
            logger.warning(
                "'%s' did not %s within %g seconds and was answered as timed out; should it still end, its result "
                "is dropped. Said once for each name",
                call.name,
                "end" if has_begun else "begin, since another async function blocks the event loop,",
                call.timeout_s,
            )
        return late(call.timeout_s, call.seconds)


def _discard(value: Any) -> None:
    """Closes a coroutine that will not be awaited, so that Python does not warn of it."""
    if inspect.iscoroutine(value):
        value.close()
