"""Where tools and environments run: threads and one event loop that nothing can hang."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import heapq
import inspect
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from groupgrad.concurrency.callables import function_name, is_async
from groupgrad.concurrency.event_loop import LoopThread

logger = logging.getLogger(__name__)

IDLE_S = 10.0
"""After so many seconds without work a thread ends; the next call starts a new one."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """How one call ended."""

    value: Any = None
    """What the function returned; None if it failed."""
    error: BaseException | None = None
    """What it raised. A `TimeoutError` of ours if `timed_out`."""
    timed_out: bool = False
    """True if it had not ended by its deadline. It may still be running."""
    seconds: float = 0.0
    """From when it started running."""


class _Job:
    """One call on its way through the workers. Its fields change under the workers' lock only."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], timeout_s: float):
        self.name = function_name(function)
        self.timeout_s = timeout_s
        self.context = contextvars.copy_context()
        self.future: Future[Outcome] = Future()
        self.future.set_running_or_notify_cancel()  # nobody can cancel it, so it always gets its outcome
        self.open: Callable[[], Any] = functools.partial(function, **kwargs)
        self.then: Callable[[Any], Any] | None = None
        self.awaitable: Any = None
        self.started: float | None = None
        self.settled = False
        self.timed_out = False
        self.in_thread = False
        self.for_loop = False
        self.begun_on_loop = False
        self.task: asyncio.Task[Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def seconds(self) -> float:
        return 0.0 if self.started is None else time.monotonic() - self.started


@dataclass(slots=True)
class _Crew:
    """The threads of the time between two `close` calls."""

    size: int = 0
    idle: int = 0
    ended: bool = False


class Workers:
    """Runs functions, plain and async, so that every call is answered by its deadline, whatever the function does.

    Plain functions run on at most `num_threads` daemon threads, async ones on one event loop. A plain function past its
    deadline is answered as timed out and its thread is given up and replaced, so that the pool never shrinks; an async
    one is cancelled. A loop that does not move for `blocked_s` seconds after a deadline, since an async function
    blocks it, is replaced; calls that had not started move to the new one. Daemon threads, so that what hangs does not
    keep the interpreter from ending. Thread-safe. Usable again after `close`.
    """

    def __init__(self, num_threads: int = 16, *, blocked_s: float = 2.0):
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads}: no tool could ever run; set it to 1 or more")
        self._num_threads = num_threads
        self._blocked_s = blocked_s
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_deadline = threading.Condition(self._lock)
        self._queue: deque[_Job] = deque()
        self._open: set[_Job] = set()
        self._crew = _Crew()
        self._deadlines: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._monitor: threading.Thread | None = None
        self._loop = LoopThread("tool-loop")
        self._loop_used = False
        self._equipped: asyncio.AbstractEventLoop | None = None
        self._warned: set[str] = set()
        self.num_timed_out = 0
        """Calls answered as timed out so far."""
        self.num_late = 0
        """Those of them that did end later; what they returned was dropped."""
        self.num_given_up = 0
        """Threads that are still inside a call that timed out."""

    def call(
        self,
        function: Callable[..., Any],
        kwargs: Mapping[str, Any],
        *,
        timeout_s: float,
        then: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> Future[Outcome]:
        """Start `function(**kwargs)`; the future is done by about `timeout_s` seconds after it started running.

        `then` is applied to what the function returned, where it ran and within the same deadline. An awaitable that a
        plain function returns is awaited on the loop. The future never raises and cannot be cancelled: whatever the
        function raises, `SystemExit` and `KeyboardInterrupt` too, is the outcome's `error`. Context variables are those
        of the caller. `name` stands for the function in warnings.
        """
        job = _Job(function, kwargs, timeout_s)
        job.then = then
        job.name = name or job.name
        job.for_loop = is_async(function)
        with self._lock:
            self._open.add(job)
            problem = None if job.for_loop else self._enqueue(job)
        if problem is not None:
            self._settle(job, Outcome(error=problem))
        elif job.for_loop:
            self._submit(job)
        return job.future

    def close(self) -> None:
        """Answer every open call with an error and end the threads. May be called any number of times."""
        with self._lock:
            jobs = list(self._open)
            crew, self._crew = self._crew, _Crew()
            crew.ended = True
            loop, self._loop = self._loop, LoopThread("tool-loop")
            used, self._loop_used = self._loop_used, False
            self._equipped = None
            self._queue.clear()
            self._deadlines.clear()
            self._has_work.notify_all()
            self._has_deadline.notify_all()
        for job in jobs:
            self._settle(job, Outcome(error=RuntimeError("the tools were closed"), seconds=job.seconds))
        if used and _answers(loop, self._blocked_s):
            loop.close()
        elif used:
            loop.abandon()

    # Threads

    def _enqueue(self, job: _Job) -> RuntimeError | None:
        """Line up a job for the threads, under the lock. The error if no thread can be had."""
        self._queue.append(job)
        problem = self._man()
        if problem is not None and self._crew.size == 0:
            self._queue.remove(job)
            return problem
        self._has_work.notify()
        return None

    def _man(self) -> RuntimeError | None:
        """Start a thread if jobs wait that no idle one can take, under the lock. The error if none can be had."""
        crew = self._crew
        if crew.idle < len(self._queue) and crew.size < self._num_threads:
            try:
                threading.Thread(target=self._work, args=(crew,), name="tool-worker", daemon=True).start()
            except RuntimeError as error:  # the system has no more threads to give
                return error
            crew.size += 1
        return None

    def _work(self, crew: _Crew) -> None:
        while (job := self._next_job(crew)) is not None:
            ended = self._run_in_thread(job)
            with self._lock:
                given_up = not job.in_thread
                job.in_thread = False
                if given_up:
                    self.num_given_up -= 1
                if goes_on := not isinstance(ended, Outcome) and not job.settled:
                    job.awaitable = ended
                    job.for_loop = True
            if goes_on:
                self._submit(job)
            elif isinstance(ended, Outcome):
                self._settle(job, ended)
            else:
                _discard(ended)
                self._settle(job, Outcome())  # counts it as late
            if given_up or crew.ended:
                return
            del job, ended  # an idle thread keeps nothing alive

    def _next_job(self, crew: _Crew) -> _Job | None:
        """The next job, marked as running; None if this thread should end."""
        with self._lock:
            crew.idle += 1
            while not self._queue and not crew.ended:
                if not self._has_work.wait(IDLE_S) and not self._queue and not crew.ended:
                    crew.size -= 1
                    crew.idle -= 1
                    return None
            crew.idle -= 1
            if crew.ended:
                return None
            job = self._queue.popleft()
            job.in_thread = True
            self._start_clock(job)
            return job

    def _run_in_thread(self, job: _Job) -> Any:
        """The outcome, or the awaitable that the function returned."""

        def run() -> Any:
            then = job.then
            value = job.open()
            if inspect.isawaitable(value):
                return value
            return Outcome(value if then is None else then(value), seconds=job.seconds)

        try:
            return job.context.run(run)
        except BaseException as error:  # SystemExit in a tool ends the tool, not the thread
            return Outcome(error=error, seconds=job.seconds)

    # The loop

    def _submit(self, job: _Job) -> None:
        with self._lock:
            loop = self._loop
            self._loop_used = True
            if not job.settled:
                # A loop that is blocked never starts it, so that its own deadline would never come.
                self._schedule(time.monotonic() + job.timeout_s, functools.partial(self._check_begun, job))
        job.context.run(loop.submit, self._serve(job))

    async def _serve(self, job: _Job) -> None:
        with self._lock:
            if job.settled or job.begun_on_loop:
                return
            job.begun_on_loop = True
            job.loop, job.task = asyncio.get_running_loop(), asyncio.current_task()
            if job.started is None:
                self._start_clock(job)
            if self._equipped is not job.loop:
                self._equipped = job.loop
                job.loop.set_default_executor(_DaemonThreads())
            then = job.then
        try:
            value = await (job.open() if job.awaitable is None else job.awaitable)
            outcome = Outcome(value if then is None else then(value), seconds=job.seconds)
        except asyncio.CancelledError as error:
            if job.settled:  # by us, at its deadline
                return
            outcome = Outcome(error=error, seconds=job.seconds)
        except BaseException as error:  # SystemExit would end the loop
            outcome = Outcome(error=error, seconds=job.seconds)
        self._settle(job, outcome)

    def _check_begun(self, job: _Job) -> None:
        if not job.settled and not job.begun_on_loop:
            self._suspect_loop()
            with self._lock:
                self._schedule(time.monotonic() + job.timeout_s, functools.partial(self._check_begun, job))

    def _suspect_loop(self) -> None:
        """Give the loop `blocked_s` seconds to show that nothing blocks it."""
        loop = self._loop
        beat = loop.submit(_nothing())
        with self._lock:
            self._schedule(time.monotonic() + self._blocked_s, functools.partial(self._judge_loop, loop, beat))

    def _judge_loop(self, loop: LoopThread, beat: Future[None]) -> None:
        with self._lock:
            if beat.done() or self._loop is not loop:
                return
            self._loop = LoopThread("tool-loop")
            moved = [job for job in self._open if job.for_loop and not job.begun_on_loop]
            # Those that had started stay where they are, each with its deadline.
            old, self._equipped = self._equipped, None
            stay = [job.task for job in self._open if job.task is not None and job.loop is old]
        loop.abandon(stay)
        logger.warning(
            "an async tool or environment method blocks its event loop; the loop was given up and replaced. Await what "
            "takes time, or make the function a plain one: plain functions run on threads of their own"
        )
        for job in moved:
            self._submit(job)

    # Deadlines

    def _start_clock(self, job: _Job) -> None:
        job.started = time.monotonic()
        self._schedule(job.started + job.timeout_s, functools.partial(self._expire, job))

    def _schedule(self, when: float, action: Callable[[], None]) -> None:
        """Have the monitor do something at a time, under the lock."""
        heapq.heappush(self._deadlines, (when, next(self._order), action))
        if self._monitor is None:
            self._monitor = threading.Thread(target=self._watch, name="tool-monitor", daemon=True)
            self._monitor.start()
        elif self._deadlines[0][2] is action:
            self._has_deadline.notify()

    def _watch(self) -> None:
        while True:
            with self._lock:
                while not self._deadlines or self._deadlines[0][0] > time.monotonic():
                    if not self._deadlines and not self._has_deadline.wait(IDLE_S) and not self._deadlines:
                        self._monitor = None
                        return
                    if self._deadlines:
                        wait = self._deadlines[0][0] - time.monotonic()
                        if wait > 0:
                            self._has_deadline.wait(min(wait, threading.TIMEOUT_MAX))
                action = heapq.heappop(self._deadlines)[2]
            try:
                action()
            except Exception:  # without the monitor no call would have a deadline
                logger.exception("a deadline could not be acted on")
            del action

    def _expire(self, job: _Job) -> None:
        """Answer a job as timed out, unless it has ended."""
        with self._lock:
            if job.settled:
                return
            if job.in_thread:
                # What `in_thread` no longer says, `_work` reads as "given up".
                job.in_thread = False
                self.num_given_up += 1
                self._crew.size -= 1
                self._man()
            job.timed_out = True
            warn = job.name not in self._warned
            self._warned.add(job.name)
        error = TimeoutError(f"it did not end within {job.timeout_s:g} seconds")
        if self._settle(job, Outcome(error=error, timed_out=True, seconds=job.seconds)):
            self.num_timed_out += 1
            if warn:
                logger.warning(
                    "'%s' did not end within %g seconds and was answered as timed out; should it still end, its result "
                    "is dropped. Said once for each name",
                    job.name,
                    job.timeout_s,
                )
        if job.task is not None and job.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                job.loop.call_soon_threadsafe(job.task.cancel)
            self._suspect_loop()

    def _settle(self, job: _Job, outcome: Outcome) -> bool:
        """Give a job its outcome; False, and counted, if it has one."""
        with self._lock:
            if job.settled:
                self.num_late += job.timed_out
                return False
            job.settled = True
            job.open, job.then = _forgotten, None  # its deadline is remembered longer than its arguments should be
            self._open.discard(job)
            unused = None if job.begun_on_loop else job.awaitable
        _discard(unused)
        job.future.set_result(outcome)
        return True


class _DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """What `asyncio.to_thread` runs on: the usual executor keeps the interpreter from ending while a call hangs."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        threading.Thread(target=run, name="tool-loop-thread", daemon=True).start()
        return future


def _answers(loop: LoopThread, seconds: float) -> bool:
    """True if nothing blocks the loop."""
    return bool(concurrent.futures.wait([loop.submit(_nothing())], timeout=seconds).done)


async def _nothing() -> None:
    return None


def _forgotten() -> Any:
    raise RuntimeError("the call has been answered")


def _discard(awaitable: Any) -> None:
    """Close what will not be awaited, so that Python does not warn of it."""
    if inspect.iscoroutine(awaitable):
        awaitable.close()
