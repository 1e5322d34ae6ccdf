"""A child process that runs functions one call at a time, each with a deadline after which the process is killed.

The child is started by loky: a new interpreter, so that no lock, thread or accelerator of this process is copied, and
without the main script, which need not have a main guard. Functions are pickled by cloudpickle, closures included, and
sent once to each process; arguments are sent with each call.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import util
from multiprocessing.connection import wait
from typing import Any

import cloudpickle

from groupgrad.concurrency.daemon_threads import DedicatedThread
from groupgrad.concurrency.worker_main import RemoteTraceback, serve
from groupgrad.concurrency.workers import Outcome, late, slices

START_TIMEOUT_S = 120.0
"""Seconds for a process to start and to load its functions."""
EXIT_S = 1.0
"""Seconds that an ending process has before it is killed."""


class WorkerDied(RuntimeError):
    """A worker process ended during a call: it crashed, exited or was killed."""


class WorkerNotStarted(RuntimeError):
    """A worker process could not start or load its functions."""


class WorkerProcess:
    """Runs calls in a child process, one after another. Thread-safe.

    The process starts with the first call, and again after it has ended. A call past its deadline costs its process, as
    does one that crashes it; the next call gets a new one. The process and its descendants end with `kill`, with this
    object, or with the interpreter; it ends also if this process is killed. After a fork it is the parent's alone.
    """

    def __init__(
        self,
        functions: Sequence[bytes],
        *,
        name: str,
        initializer: Callable[[], object] | None = None,
        memory_bytes: int | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        setup = None if initializer is None else cloudpickle.dumps(initializer)
        self._child = _Child(name, (tuple(functions), setup, memory_bytes), dict(environment or {}))
        self._thread = DedicatedThread(name)  # the process ends with the thread that has started it
        # Before multiprocessing waits for its processes at exit.
        util.Finalize(self, _Child.kill, args=(self._child,), exitpriority=10)

    @property
    def pid(self) -> int | None:
        """Number of the running process; None while there is none."""
        return self._child.pid

    def call(self, function: int, arguments: tuple[Any, ...], *, timeout_s: float | None = None) -> Future[Outcome]:
        """Calls `functions[function](*arguments)`; `timeout_s` counts from its start, None is no limit.

        The future never raises: the outcome has the exception that the function raised, `NoAnswer` past the deadline,
        `WorkerDied`, or `WorkerNotStarted`. What pickle raises for arguments that cannot be sent is raised at once.
        """
        request = cloudpickle.dumps((function, arguments))
        return self._thread.submit(self._child.run, request, timeout_s, self._child.num_kills)

    def start(self) -> Future[Outcome]:
        """Starts the process if it is not running. The outcome has `WorkerNotStarted` if it fails."""
        return self._thread.submit(self._child.run, None, None, self._child.num_kills)

    def kill(self) -> None:
        """Ends the process and takes back all calls, whose outcomes then have `WorkerDied`. The next call starts it."""
        self._child.kill()


class _Child:
    """The process and its connection. `kill` is for any thread, the rest for one."""

    def __init__(self, name: str, arguments: tuple[Any, ...], environment: dict[str, str]):
        self._name, self._arguments, self._environment = name, arguments, environment
        self.num_kills = 0
        """A call made before the last of them is taken back."""
        self._process: Any = None
        self._connection: Any = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def kill(self) -> None:
        """Ends the process and its descendants and takes back the calls made so far."""
        with self._lock:
            self.num_kills += 1
            if self._process is not None:
                _kill_tree(self._process)

    def run(self, request: bytes | None, timeout_s: float | None, num_kills: int) -> Outcome:
        """Sends a request (function number and arguments, pickled) to the process, which is started if need be.

        None only has it started. `num_kills` is that of the time when the call was made.
        """
        began = time.monotonic()
        try:
            self._ensure_started(num_kills)
            if request is None:
                return Outcome(seconds=time.monotonic() - began)
            with self._lock:  # a later kill ends the process
                self._check_wanted(num_kills)
            began = time.monotonic()
            self._connection.send_bytes(request)
            reply = self._receive(timeout_s)
            with self._lock:  # a function may still return when the processes that it waits for are killed
                self._check_wanted(num_kills)
        except (WorkerDied, WorkerNotStarted) as error:
            # Its frames would keep the thread alive, and with it the process.
            return Outcome(error=error.with_traceback(None), seconds=time.monotonic() - began)
        except (EOFError, OSError):
            return Outcome(error=WorkerDied(_ending(self._end())), seconds=time.monotonic() - began)
        seconds = time.monotonic() - began
        if reply is None:
            self._end()
            return late(timeout_s, seconds)
        value, error = _loaded(reply)
        return Outcome(value, error, seconds=seconds)

    def _ensure_started(self, num_kills: int) -> None:
        if self._process is not None and not self._process.is_alive():
            self._end()
        if self._process is not None:
            return
        from loky.backend import get_context, utils  # noqa: F401 - needed to end it, also while the interpreter ends

        context: Any = get_context("loky")
        self._connection, theirs = context.Pipe()
        arguments = theirs, *self._arguments, os.getpid()
        process = context.Process(target=serve, args=arguments, name=self._name, env=self._environment)
        with self._lock:
            self._check_wanted(num_kills)
            process.start()
            self._process = process
        theirs.close()
        try:
            reply = self._receive(START_TIMEOUT_S)
        except (EOFError, OSError):
            raise WorkerNotStarted(f"it {_ending(self._end())}") from None
        error: BaseException | None = TimeoutError(f"it was not ready after {START_TIMEOUT_S:g} seconds")
        if reply is not None:
            _, error = _loaded(reply)
        if error is not None:
            self._end()
            raise WorkerNotStarted(f"{type(error).__name__}: {error}") from error

    def _check_wanted(self, num_kills: int) -> None:
        if num_kills != self.num_kills:
            raise WorkerDied("was stopped")

    def _receive(self, timeout_s: float | None) -> bytes | None:
        """The next message; None if none has come by the deadline. EOFError if the process has ended."""
        for seconds in slices(timeout_s):
            if wait([self._connection, self._process.sentinel], seconds):
                break
        else:
            return None
        if not self._connection.poll():  # a process that the function has left behind may keep the pipe open
            raise EOFError
        return self._connection.recv_bytes()

    def _end(self) -> int | None:
        """Ends what is left of the process and returns its exit code."""
        process, connection = self._process, self._connection
        is_ending = connection.poll(0) if not connection.closed else True
        process.join(EXIT_S if is_ending else 0.0)
        with self._lock:
            _kill_tree(process)
            self._process = None
        connection.close()
        return process.exitcode


def _kill_tree(process: Any) -> None:
    from loky.backend.utils import kill_process_tree  # loaded when it was started

    kill_process_tree(process)


def _loaded(reply: bytes) -> tuple[Any, BaseException | None]:
    """Value and error of a reply; an error has the traceback in the process as its cause."""
    try:
        value, failure = pickle.loads(reply)
    except Exception as error:
        return None, error
    if failure is None:
        return value, None
    error, text = failure
    error.__cause__ = RemoteTraceback(text)
    return None, error


def _ending(exit_code: int | None) -> str:
    """Describes how a process ended, to complete the sentence "its worker process ..."."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in list(signal.Signals) else f"signal {-exit_code}"
    return f"was killed by {name}{', perhaps since memory ran out' if name == 'SIGKILL' else ''}"
