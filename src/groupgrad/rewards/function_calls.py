"""Runs reward functions: on this thread, on an event loop, or in worker processes, each attempt with a deadline."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cloudpickle
from transformers import TrainerState

from groupgrad import dist
from groupgrad.concurrency.callables import innermost
from groupgrad.concurrency.deadline import DeadlinePassed, call_within
from groupgrad.concurrency.event_loop import USER_LOOP
from groupgrad.concurrency.running_time import slices
from groupgrad.concurrency.worker_process import WorkerProcess
from groupgrad.concurrency.workers import NoAnswer, Outcome, late
from groupgrad.errors import RewardError
from groupgrad.rewards.call_inputs import CallInputs, CallLog
from groupgrad.rewards.functions import RewardFunction
from groupgrad.rewards.remote_function import RemoteFunction
from groupgrad.rewards.supervision import SupervisionOptions, failure

LOGGERS = ("log_extra", "log_metric")
BLOCKED_S = 2.0
"""Time past its deadline after which an async function is taken to block its event loop."""


@dataclass(slots=True, frozen=True)
class BegunCall:
    """A call of a reward function."""

    finish: Callable[[], Outcome]
    """Waits for it, or makes it if it runs on the thread that waits."""
    cancel: Callable[[], object] = lambda: None
    """Cancels a call whose result is no longer needed."""


class FunctionCalls:
    """Begins calls of reward functions and waits for them. TypeError for functions that no worker process can run.

    Async functions run on the event loop of the process. Plain ones run in `options.num_workers` processes, each
    function always in the same, so that what it keeps between calls stays together; without workers on the thread that
    waits.
    """

    def __init__(self, functions: Sequence[RewardFunction], options: SupervisionOptions):
        self._options = options
        remote = [function for function in functions if _runs_in_workers(function)] if options.num_workers else []
        num_workers = min(options.num_workers, len(remote))
        self._place: dict[int, tuple[WorkerProcess, int]] = {}
        """Identity of a function -> its process, and its number there."""
        self._workers: list[WorkerProcess] = []
        for index in range(num_workers):
            own = remote[index::num_workers]
            worker = WorkerProcess(
                [_pickled(function) for function in own],
                name=f"reward-worker-{index}",
                memory_bytes=options.worker_memory_bytes,
                environment=_threads(num_workers),
            )
            self._workers.append(worker)
            self._place |= {id(function): (worker, number) for number, function in enumerate(own)}
        self._start(remote)

    def runs_at_once(self, function: RewardFunction) -> bool:
        """True if `begin` starts the function; others run when they are waited for."""
        return function.is_async or id(function) in self._place

    def begin(self, function: RewardFunction, inputs: CallInputs, log: CallLog) -> BegunCall:
        """Begins a call. RewardError if its arguments are missing, or cannot be sent to a process.

        Its outcome has what the function raised, NoAnswer past the deadline, or WorkerDied. KeyboardInterrupt, and what
        ends the run, is raised where the call is waited for.
        """
        arguments = function.arguments(inputs, log)
        if id(function) in self._place:
            return self._in_worker(function, arguments, inputs, log)
        if function.is_async:
            return self._on_loop(functools.partial(function.call, **arguments))
        return BegunCall(functools.partial(self._here, function, arguments, inputs))

    @property
    def num_workers(self) -> int:
        """Number of processes; fewer than asked for if there are fewer plain functions."""
        return len(self._workers)

    def close_workers(self) -> None:
        """Ends the worker processes; the next call starts them again."""
        for worker in self._workers:
            worker.close()

    def _start(self, functions: Sequence[RewardFunction]) -> None:
        """Starts all workers at once. TypeError if one cannot load its functions."""
        for worker, outcome in [(worker, worker.start()) for worker in self._workers]:
            error = outcome.result().error
            if error is not None:
                names = ", ".join(repr(f.name) for f in functions if self._place[id(f)][0] is worker)
                self.close_workers()
                raise TypeError(
                    f"reward_workers={self._options.num_workers}: the process for {names} cannot start: {error}. What "
                    "a function uses must be importable in a new process, and fit into reward_worker_memory_gb; or set "
                    "reward_workers=0"
                ) from error

    def _in_worker(
        self, function: RewardFunction, arguments: dict[str, Any], inputs: CallInputs, log: CallLog
    ) -> BegunCall:
        worker, number = self._place[id(function)]
        loggers = [name for name in LOGGERS if arguments.pop(name, None) is not None]
        state = arguments.get("trainer_state")
        if isinstance(state, TrainerState):  # whose class takes seconds and memory to import
            arguments["trainer_state"] = SimpleNamespace(**vars(state))
        seed = f"{self._options.seed}/{dist.rank()}/{function.name}/{inputs.step}"
        try:
            future = worker.call(number, (arguments, loggers, seed), timeout_s=self._options.timeout_s)
        except Exception as error:
            name = next((name for name, value in arguments.items() if not _can_be_sent(value)), "?")
            raise RewardError(
                f"reward function '{function.name}', step {inputs.step}: its argument '{name}' cannot be sent to a "
                f"worker process ({type(error).__name__}: {error}); remove the column, or set reward_workers=0"
            ) from error

        def finish() -> Outcome:
            outcome = _result(future)
            if outcome.error is not None:
                return outcome
            returned, logged = outcome.value
            for logger, args, kwargs in logged:
                getattr(log, logger)(*args, **kwargs)
            return Outcome(returned, seconds=outcome.seconds)

        return BegunCall(finish, lambda: None if future.done() else worker.kill())

    def _on_loop(self, call: Callable[[], Any]) -> BegunCall:
        timeout_s = self._options.timeout_s
        attempt = _LoopAttempt(call, timeout_s)
        longest_s = None if timeout_s is None else timeout_s + BLOCKED_S

        def finish() -> Outcome:
            for seconds in slices(longest_s):
                if (outcome := attempt.wait(seconds)) is not None:
                    return outcome
            USER_LOOP.give_up(attempt.loop)  # the function does not let its loop move
            return late(timeout_s, (timeout_s or 0.0) + BLOCKED_S)

        return BegunCall(finish, attempt.cancel)

    def _here(self, function: RewardFunction, arguments: dict[str, Any], inputs: CallInputs) -> Outcome:
        timeout_s, began = self._options.timeout_s, time.monotonic()
        try:
            if timeout_s is None:
                returned = function.call(**arguments)
            else:
                message = str(failure(NoAnswer(), function.name, inputs, timeout_s))
                returned = call_within(timeout_s, lambda: function.call(**arguments), message)
        except (Exception, SystemExit) as error:
            return Outcome(error=error, seconds=time.monotonic() - began)
        except DeadlinePassed:
            return late(timeout_s, time.monotonic() - began)
        if inspect.isawaitable(returned):  # a plain function, such as a lambda, around an async one
            return self._on_loop(lambda: returned).finish()
        return Outcome(returned, seconds=time.monotonic() - began)


async def _attempt(call: Callable[[], Any], timeout_s: float | None) -> Outcome:
    """The outcome of an awaitable. KeyboardInterrupt and SystemExit, if raised, would end the event loop."""
    began = time.monotonic()

    async def run() -> Outcome:
        try:
            value = await call()
            return Outcome(value, seconds=time.monotonic() - began)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            return Outcome(error=error, seconds=time.monotonic() - began)

    task = asyncio.ensure_future(run())
    try:
        for seconds in slices(timeout_s):
            if (await asyncio.wait({task}, timeout=seconds))[0]:
                break
        return task.result() if task.done() else late(timeout_s, time.monotonic() - began)
    finally:
        task.cancel()


class _LoopAttempt:
    """A call on the event loop of the process. It moves to a new one if its own is given up before the call began."""

    def __init__(self, call: Callable[[], Any], timeout_s: float | None):
        self._call, self._timeout_s = call, timeout_s
        self._submit()

    def _submit(self) -> None:
        self._claimed = claimed = threading.Lock()

        async def begin() -> Outcome:
            if not claimed.acquire(blocking=False):
                return Outcome(error=RuntimeError("it was begun on another event loop"))
            return await _attempt(self._call, self._timeout_s)

        self.future, self.loop = USER_LOOP.submit(begin())

    def cancel(self) -> None:
        """Cancels the call, wherever it is."""
        self.future.cancel()

    def wait(self, seconds: float) -> Outcome | None:
        """The outcome; None if it is not there after this time."""
        if futures.wait([self.future], seconds).done:
            return self.future.result()
        if self.loop is not USER_LOOP.loop and self._claimed.acquire(blocking=False):
            self._submit()
        return None


def _result(future: futures.Future[Outcome]) -> Outcome:
    """Waits for an outcome."""
    for seconds in slices(None):  # a signal that comes just before a wait is noticed after it
        if futures.wait([future], seconds).done:
            break
    return future.result(0)


def _runs_in_workers(function: RewardFunction) -> bool:
    """False for async functions, and for groupgrad's own functions that start workers themselves."""
    return not function.is_async and not getattr(innermost(function.call), "has_own_workers", False)


def _pickled(function: RewardFunction) -> bytes:
    try:
        return cloudpickle.dumps(RemoteFunction(function.call))
    except Exception as error:
        raise TypeError(
            f"reward function '{function.name}' cannot be sent to a worker process ({type(error).__name__}: {error}); "
            "make what it holds inside the function, or set reward_workers=0"
        ) from error


def _can_be_sent(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # pickling runs code of the value, which may raise anything
        return False
    return True


def _threads(num_workers: int) -> dict[str, str]:
    """The share of the CPUs for each process, unless the environment has a number."""
    share = max((os.cpu_count() or 1) // max(num_workers, 1), 1)
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(share)}
