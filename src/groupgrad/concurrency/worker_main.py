"""Child side of `worker_process`: loads functions once and calls them on request.

Imported in every child process, so it imports little, and neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import faulthandler
import hashlib
import inspect
import logging
import os
import pickle
import random
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl`: the signal that a process gets when the thread that started it ends."""


def drop_output() -> None:
    """Drops what this child process prints and logs below an error, for libraries that print remarks."""
    logging.disable(logging.WARNING)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


class RemoteTraceback(Exception):
    """Cause of an exception that was raised in a worker process; its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RemoteError(RuntimeError):
    """Stands for an exception of a function that cannot be sent to another process."""

    def __init__(self, text: str, names: tuple[str, ...]):
        super().__init__(text, names)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the exception's classes, see `class_names`."""
        return self.args[1]

    def __str__(self) -> str:
        return self.args[0]


def class_names(error: BaseException) -> tuple[str, ...]:
    """Names of an exception's class and of those above it, with and without their modules."""
    if isinstance(error, RemoteError):
        return error.names
    kinds = type(error).__mro__
    return tuple(name for kind in kinds for name in (kind.__name__, f"{kind.__module__}.{kind.__name__}"))


def serve(
    connection: Connection,
    functions: Sequence[bytes],
    initializer: bytes | None,
    memory_bytes: int | None,
    parent: int,
) -> None:
    """Answers requests until the parent closes the connection or ends.

    The first reply is (None, None), or (None, error) if a function cannot be loaded. `memory_bytes` limits the private
    memory of this process.
    """
    _end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)  # the trainer decides what a signal ends
    faulthandler.enable()
    loaded: list[Callable[..., Any]] = []

    def load() -> None:
        _limit_memory(memory_bytes)
        if initializer is not None:
            pickle.loads(initializer)()
        loaded.extend(map(pickle.loads, functions))

    def answer(request: bytes) -> Any:
        index, arguments = pickle.loads(request)
        return loaded[index](*arguments)

    with contextlib.suppress(EOFError, BrokenPipeError):
        connection.send_bytes(_reply(load))
        while True:
            request = connection.recv_bytes()
            connection.send_bytes(_reply(lambda: answer(request)))  # noqa: B023 - called at once
    os._exit(0)  # without waiting for threads that a function has left behind


def _reply(call: Callable[[], Any]) -> bytes:
    try:
        return cloudpickle.dumps((call(), None))
    except BaseException as error:  # SystemExit in a function ends the call, not the process
        text = traceback.format_exc()
        with contextlib.suppress(Exception):
            reply = cloudpickle.dumps((None, (error, text)))
            pickle.loads(reply)  # some exceptions can be pickled but not loaded
            return reply
        return cloudpickle.dumps((None, (RemoteError(f"{type(error).__name__}: {error}", class_names(error)), text)))


def _limit_memory(num_bytes: int | None) -> None:
    if num_bytes is not None:
        # Not the address space, of which libraries for accelerators reserve many times what they use.
        with contextlib.suppress(ValueError, OSError):  # under a lower limit than this one; deadlines still apply
            resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def _end_with(parent: int) -> None:
    """Ends this process when its parent ends, even inside a call that never returns to Python."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not Linux: it ends with its next reply
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def call_logged(
    function: Callable[..., Any], arguments: dict[str, Any], loggers: list[str], seed: str
) -> tuple[Any, list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    """Calls a reward function with `loggers` that record their calls.

    Returns the rewards, and the calls as (logger, arguments, keyword arguments). The random streams of Python, NumPy
    and, if loaded, PyTorch start at `seed`.
    """
    _set_seed(seed)
    logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for logger in loggers:
        arguments[logger] = lambda *args, logger=logger, **kwargs: logged.append(
            (logger, copy.deepcopy(args), copy.deepcopy(kwargs))
        )
    returned = function(**arguments)
    if inspect.isawaitable(returned):  # a plain function, such as a lambda, around an async one
        returned = asyncio.run(_awaited(returned))
    return returned, list(logged)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _set_seed(text: str) -> None:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    random.seed(number)
    np.random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)
