"""Checks where a script enters the trainer, before anything is sampled: `train`, `evaluate` and `predict`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")

_LOCK = threading.RLock()
_holders: list[tuple[str, str]] = []
"""The thread that holds the lock, and what it does, for each time that it has taken it."""


@contextmanager
def one_thread(what: str) -> Iterator[None]:
    """Context of work on a model that no other thread of this process may do now; RuntimeError if one does.

    Attention and modules are switched for the whole process while a model samples or trains, so two threads would
    change each other's numbers.
    """
    if not _LOCK.acquire(blocking=False):
        other, doing = _holders[-1] if _holders else ("another thread", "a trainer")
        raise RuntimeError(
            f"{what} was called in {threading.current_thread().name} while {doing} runs in {other}: two threads of a "
            "process would change each other's numbers. Call one after the other, or start a process for each"
        )
    _holders.append((threading.current_thread().name, what))
    try:
        yield
    finally:
        _holders.pop()
        _LOCK.release()


def entry(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Decorates a method of the trainer that a script calls to train or to evaluate."""

    @wraps(method)
    def checked(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with one_thread(f"{method.__name__}()"):
            return method(self, *args, **kwargs)

    return checked
