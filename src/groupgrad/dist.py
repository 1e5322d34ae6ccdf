"""The only collectives of groupgrad. Without a process group every function is the identity of one rank.

Every rank must call a collective the same number of times, also with nothing to give.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

T = TypeVar("T")

GLOO_REST_S = 0.25
"""How long a process that met others over gloo rests before its interpreter shuts down."""


def is_active() -> bool:
    """True if several ranks train together."""
    return torch_dist.is_available() and torch_dist.is_initialized() and torch_dist.get_world_size() > 1


def world_size() -> int:
    """Number of ranks."""
    return torch_dist.get_world_size() if is_active() else 1


def rank() -> int:
    """This process's number, 0 to world_size-1."""
    return torch_dist.get_rank() if is_active() else 0


def is_main() -> bool:
    """True on rank 0."""
    return rank() == 0


def all_gather_objects(obj: T, group: Any = None) -> list[T]:
    """Collective. One picklable object from each rank, in rank order; of a process group's ranks alone if given."""
    if not is_active():
        return [obj]
    _rest_at_exit()
    gathered: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(gathered, obj, group=group)
    return gathered


def all_gather_rows(values: torch.Tensor) -> torch.Tensor:
    """Collective. The ranks' rows end to end in rank order; ranks may hold different numbers of rows.

    `values` is (B, ...) with equal trailing shape and dtype on all ranks. No gradient flows.
    """
    if not is_active():
        return values
    parts = all_gather_objects(values.detach().cpu())
    return torch.cat(parts).to(values.device)


def all_sum(values: list[float]) -> list[float]:
    """Collective. Element-wise sum over ranks of equally long lists of numbers, in float64."""
    if not is_active():
        return [float(value) for value in values]
    return [float(sum(column)) for column in zip(*all_gather_objects([float(value) for value in values]))]


@contextmanager
def together() -> Iterator[None]:
    """Collective at its end. What is raised inside on any rank is raised on all; inside there is no collective."""
    error: BaseException | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    raise_together(error)


def raise_together(error: BaseException | None) -> None:
    """Collective. If any rank failed, raise on all of them, so that none is left waiting in the next collective.

    The rank that failed raises its own error; the others raise a RuntimeError that quotes it.
    """
    if not is_active():
        if error is not None:
            raise error
        return
    messages = all_gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for failed_rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"stopped because rank {failed_rank} failed with {message}")


@cache
def _rest_at_exit() -> None:
    """Once: see to it that gloo's threads have let go of their last tensors when the interpreter shuts down.

    A thread that ends a collective drops its tensors a moment after those who wait for it went on, and needs the
    interpreter's lock for that. If the main thread has begun to shut down by then, the process is aborted ("terminate
    called without an active exception") after its work, and the launcher reports a failure. On two busy cores that
    befell every third run, `destroy_process_group()` or not, since DDP's reducer holds the group too. A main thread
    that sleeps leaves the lock to them. Can go with https://github.com/pytorch/pytorch/issues/190489.
    """
    if "gloo" in str(torch_dist.get_backend_config()):
        atexit.register(time.sleep, GLOO_REST_S)
