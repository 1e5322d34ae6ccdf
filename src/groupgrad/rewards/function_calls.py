"""Calls reward functions: on this thread, on the event loop of the process, or in worker processes.

The options say by which deadlines, how often after a transient error, and what a failure means.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import cloudpickle
import numpy as np
import torch
from transformers import TrainerState

from groupgrad import dist
from groupgrad.concurrency.callables import innermost
from groupgrad.concurrency.worker_main import call_logged, class_names
from groupgrad.concurrency.worker_process import WorkerProcess
from groupgrad.concurrency.workers import NoAnswer, Outcome, Workers, call_here, slices
from groupgrad.errors import RewardError
from groupgrad.metrics import Metric, maximum, total
from groupgrad.rewards.call_inputs import CallInputs, CallLog
from groupgrad.rewards.functions import RewardFunction

FailureAction = Literal["error"] | float | None
"""The reward of the rows of a failed call: a number, None for no reward, or an error."""

NUM_TIMES = 200
"""Calls whose durations are kept for the percentiles."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True, frozen=True)
class SupervisionOptions:
    """Settings that supervise the calls of reward functions."""

    timeout_s: float | None = None
    """Seconds for one attempt of one call; None is no limit."""
    num_workers: int = 0
    """Processes that run the plain functions; 0: the training process."""
    worker_memory_bytes: int | None = None
    retries: int = 0
    """Further attempts after a transient error."""
    transient_errors: tuple[str, ...] = ("ConnectionError", "TimeoutError")
    """Names of exception classes; their subclasses count too."""
    on_failure: FailureAction | Mapping[str, FailureAction] = "error"
    """One for all functions, or by name; functions without an entry end the run."""
    seed: int = 0
    """Seed of the random streams in worker processes."""

    @property
    def is_active(self) -> bool:
        """True if anything is supervised."""
        return self.timeout_s is not None or bool(self.num_workers or self.retries) or self.on_failure != "error"

    def action(self, name: str) -> FailureAction:
        """Returns the outcome of a failed call of this function."""
        return self.on_failure.get(name, "error") if isinstance(self.on_failure, Mapping) else self.on_failure

    def pause_s(self, error: BaseException, attempt: int) -> float | None:
        """Seconds to wait before a function is called again after this attempt; None unless its error is transient.

        A missed deadline never is. Pauses double.
        """
        is_transient = not set(class_names(error)).isdisjoint(self.transient_errors)
        if attempt > self.retries or isinstance(error, NoAnswer) or not is_transient:
            return None
        return min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S)


@dataclass(slots=True)
class CallStatistics:
    """Durations and failures of the calls of one function on this rank."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    """Seconds of the last calls, all attempts together."""
    failures: int = 0
    """Failed calls since the last `take`, those past the deadline too."""
    timeouts: int = 0

    def take(self, name: str) -> dict[str, Metric]:
        """The metrics of the last call: durations of the slowest rank, sums of failures and timeouts."""
        median, late = np.percentile(self.times, [50, 95]) if self.times else (math.nan, math.nan)
        metrics = {
            f"time/rewards/{name}/p50": maximum(float(median)),
            f"time/rewards/{name}/p95": maximum(float(late)),
            f"time/rewards/{name}/max": maximum(self.times[-1] if self.times else math.nan),
            f"rewards/{name}/failures": total(self.failures),
            f"rewards/{name}/timeouts": total(self.timeouts),
        }
        self.failures = self.timeouts = 0
        return metrics


LOGGERS = ("log_extra", "log_metric")


@dataclass(slots=True, frozen=True)
class BegunCall:
    """A call of a reward function."""

    finish: Callable[[], Outcome]
    """Waits for it, or makes it if it runs on the thread that waits."""
    cancel: Callable[[], object] = lambda: None
    """Ends all begun calls that share its process or event loop, unless it has been answered."""
    runs_elsewhere: bool = True
    """True if it has started, in a process or on the event loop."""


class FunctionCalls:
    """Begins calls of reward functions and waits for them. TypeError for functions that no worker process can run.

    Async functions run on the event loop of the process. Plain ones run in `options.num_workers` processes, each
    function always in the same, so that what it keeps between calls stays together; without them on the thread that
    waits, or with a deadline on a thread of their own. Each attempt has the deadline `options.timeout_s`.
    """

    def __init__(self, functions: Sequence[RewardFunction], options: SupervisionOptions):
        self._options = options
        self._workers = Workers()
        """Runs the async functions, and plain ones that have a deadline and no process."""
        remote = [function for function in functions if _runs_in_process(function)] if options.num_workers else []
        num_processes = min(options.num_workers, len(remote))
        self._place: dict[int, tuple[WorkerProcess, int]] = {}
        """Identity of a function -> its process, and its number there."""
        self._processes: list[WorkerProcess] = []
        for index in range(num_processes):
            loaded = remote[index::num_processes]
            process = WorkerProcess(
                [_pickled(function) for function in loaded],
                name=f"reward-worker-{index}",
                memory_bytes=options.worker_memory_bytes,
                environment=_threads(num_processes),
            )
            self._processes.append(process)
            self._place |= {id(function): (process, number) for number, function in enumerate(loaded)}
        self._start(remote)

    def begin(self, function: RewardFunction, inputs: CallInputs, log: CallLog) -> BegunCall:
        """Begins a call. RewardError if its arguments are missing, or cannot be sent to a process.

        Its outcome has what the function raised, NoAnswer past the deadline, or WorkerDied. KeyboardInterrupt, and what
        ends the run, is raised where the call is waited for.
        """
        arguments = function.arguments(inputs, log)
        if id(function) in self._place:
            return self._in_process(function, arguments, inputs, log)
        if function.is_async:
            return self._on_loop(function.call, arguments)
        return BegunCall(functools.partial(self._here, function, arguments), runs_elsewhere=False)

    @property
    def num_workers(self) -> int:
        """Number of processes; fewer than asked for if there are fewer plain functions."""
        return len(self._processes)

    def close_workers(self) -> None:
        """Ends the worker processes and the supervision of async functions; the next call starts them again."""
        self._workers.close()
        for process in self._processes:
            process.kill()

    def _start(self, functions: Sequence[RewardFunction]) -> None:
        """Starts all processes at once. TypeError if one cannot load its functions."""
        for process, outcome in [(process, process.start()) for process in self._processes]:
            error = outcome.result().error
            if error is not None:
                names = ", ".join(repr(f.name) for f in functions if self._place[id(f)][0] is process)
                self.close_workers()
                raise TypeError(
                    f"reward_workers={self._options.num_workers}: the process for {names} cannot start: {error}. What "
                    "a function uses must be importable in a new process, and fit into reward_worker_memory_gb; or set "
                    "reward_workers=0"
                ) from error

    def _in_process(
        self, function: RewardFunction, arguments: dict[str, Any], inputs: CallInputs, log: CallLog
    ) -> BegunCall:
        process, number = self._place[id(function)]
        loggers = [name for name in LOGGERS if arguments.pop(name, None) is not None]
        state = arguments.get("trainer_state")
        if isinstance(state, TrainerState):  # whose class takes seconds and memory to import
            arguments["trainer_state"] = SimpleNamespace(**vars(state))
        seed = f"{self._options.seed}/{dist.rank()}/{function.name}/{inputs.step}"
        try:
            future = process.call(number, (arguments, loggers, seed), timeout_s=self._options.timeout_s)
        except Exception as error:
            raise RewardError(
                f"reward function '{function.name}', step {inputs.step}: its arguments {', '.join(arguments)} cannot "
                f"be sent to a worker process ({type(error).__name__}: {error}); remove the column whose values "
                "cannot, or set reward_workers=0"
            ) from error

        def finish() -> Outcome:
            outcome = _wait(future)
            if outcome.error is not None:
                return outcome
            returned, logged = outcome.value
            for name, args, kwargs in logged:
                getattr(log, name)(*args, **kwargs)
            return Outcome(returned, seconds=outcome.seconds)

        return BegunCall(finish, lambda: None if future.done() else process.kill())

    def _on_loop(self, call: Callable[..., Any], arguments: dict[str, Any]) -> BegunCall:
        future = self._workers.call(call, arguments, timeout_s=self._options.timeout_s)
        return BegunCall(lambda: _wait(future), lambda: None if future.done() else self._workers.close())

    def _here(self, function: RewardFunction, arguments: dict[str, Any]) -> Outcome:
        timeout_s = self._options.timeout_s
        if timeout_s is not None:
            return _wait(self._workers.call(function.call, arguments, timeout_s=timeout_s))
        outcome = call_here(lambda: function.call(**arguments))
        if inspect.isawaitable(outcome.value):  # a plain function, such as a lambda, around an async one
            return self._on_loop(lambda: outcome.value, {}).finish()
        return outcome


def _wait(future: futures.Future[Outcome]) -> Outcome:
    """Waits for an outcome."""
    for seconds in slices(None):  # a signal that comes just before a wait is noticed after it
        if futures.wait([future], seconds).done:
            break
    return future.result(0)


def _runs_in_process(function: RewardFunction) -> bool:
    """False for async functions, and for groupgrad's accuracy rewards, which start processes themselves."""
    return not function.is_async and not getattr(innermost(function.call), "starts_processes", False)


def _pickled(function: RewardFunction) -> bytes:
    try:
        return cloudpickle.dumps(functools.partial(call_logged, function.call))
    except Exception as error:
        raise TypeError(
            f"reward function '{function.name}' cannot be sent to a worker process ({type(error).__name__}: {error}); "
            "make what it holds inside the function, or set reward_workers=0"
        ) from error


def _threads(num_processes: int) -> dict[str, str]:
    """The share of the CPUs for each process, unless the environment has a number."""
    share = max((os.cpu_count() or 1) // max(num_processes, 1), 1)
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(share)}


# -------------------------------------------- torch's process-wide settings, with which training computes


def _set_default_device(device: torch.device) -> None:
    # A default device of its own costs time at each call of torch, which the plain "cpu" need not.
    torch.set_default_device(None if device.type == "cpu" else device)


def _float32_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's older and newer setting differ, as after transformers' `tf32`
        return None


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_default_device),
    (_float32_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
)
"""The functions that read and set each setting; None is read where a setting cannot be told."""


@contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Context that puts torch's settings back at its end, whatever a reward function has set."""
    before = [get() for get, _ in _SETTINGS]
    try:
        yield
    finally:
        for value, (get, put_back) in zip(before, _SETTINGS):
            if value is not None and get() != value:
                put_back(value)
