"""The only collectives of groupgrad. Without a process group every function is the identity of one rank.

Every rank must call a collective the same number of times, also with nothing to give.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import nn

T = TypeVar("T")

BUCKET_BYTES = 25 * 2**20
"""How much of small gradients travels between ranks at a time."""

LARGE_BYTES = 2**20
"""A gradient from this size on travels alone, from where it lies: a call costs little beside it, a copy does not."""

GLOO_EXIT_DELAY_S = 0.25
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


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Collective. Each gradient becomes its mean over ranks, in its own type; who has none of a parameter counts as 0.

    A parameter without a gradient on every rank stays without. The ranks' `parameters` are the same in the same order
    (RuntimeError if their numbers differ). Small gradients travel together, copied `bucket_bytes` at a time, so that
    there is never a copy of all of them. Sums are over gradients that are divided already, which keeps float16 from
    overflowing.
    """
    if not is_active():
        return
    parameters = list(parameters)
    present = all_gather_objects(bytes(parameter.grad is not None for parameter in parameters))
    if len({len(mine) for mine in present}) > 1:
        counts = ", ".join(str(len(mine)) for mine in present)
        raise RuntimeError(f"the ranks train different parameters: {counts} of them; freeze the same on all")
    gradients: list[torch.Tensor] = []
    for parameter, *ranks in zip(parameters, *present):
        if any(ranks):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    underway: list[_Bucket] = []
    for tensors in _bucketed(gradients, bucket_bytes):
        underway.append(_Bucket(tensors))
        if len(underway) > 2:  # those before it travel while it is filled
            underway.pop(0).receive()
    for bucket in underway:
        bucket.receive()


def _bucketed(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """The tensors, of one type and device and at most `size` bytes at a time; large ones alone."""
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        if tensor.nbytes >= min(LARGE_BYTES, size):
            yield [tensor]
            continue
        kind = tensor.dtype, tensor.device
        if kind in filling and filled[kind] + tensor.nbytes > size:
            yield filling.pop(kind)
        if kind not in filling:
            filling[kind], filled[kind] = [], 0
        filling[kind].append(tensor)
        filled[kind] += tensor.nbytes
    yield from filling.values()


class _Bucket:
    """Collective. Tensors of one type and device on their way to their mean over ranks."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = tensors
        self._lies_there = len(tensors) == 1 and tensors[0].is_contiguous()
        self._flat = tensors[0].view(-1) if self._lies_there else torch.cat([t.reshape(-1) for t in tensors])
        self._flat /= world_size()
        self._work: Any = torch_dist.all_reduce(self._flat, async_op=True)

    def receive(self) -> None:
        """Wait until all ranks have sent theirs, and leave the mean in the tensors."""
        self._work.wait()
        if not self._lies_there:
            parts = self._flat.split([tensor.numel() for tensor in self._tensors])
            for tensor, mean in zip(self._tensors, parts):
                tensor.copy_(mean.view_as(tensor))


@torch.no_grad()
def broadcast_module(module: nn.Module, *, buffers: bool = True) -> None:
    """Collective. The parameters of `module`, and its buffers, are rank 0's from here on.

    RuntimeError, on all ranks, if names, shapes, types or what is frozen differ. Quantized weights that are tensors of
    a kind of their own stay what each rank has loaded.
    """
    if not is_active():
        return
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    if buffers:
        tensors |= dict(module.named_buffers())
    mine = {name: f"{tuple(t.shape)} {t.dtype}{' frozen' * (not t.requires_grad)}" for name, t in tensors.items()}
    for other, theirs in enumerate(all_gather_objects(mine)):
        if theirs != mine:
            name = min(key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key))
            raise RuntimeError(
                f"ranks {rank()} and {other} have different models: {name} is {mine.get(name, 'not there')} here and "
                f"{theirs.get(name, 'not there')} there; give the same model to all"
            )
    for tensor in tensors.values():
        if type(tensor.data) is torch.Tensor:
            broadcast_tensor(tensor.data)


def broadcast_tensor(tensor: torch.Tensor) -> None:
    """Collective. The numbers of `tensor` are rank 0's from here on; on all ranks it has one shape and type."""
    if is_active():
        # As bytes, since not every way between ranks knows every type.
        sent = tensor.reshape(-1).view(torch.uint8)
        torch_dist.broadcast(sent, src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent.view(tensor.dtype).view_as(tensor))


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Collective at its end. What is raised inside on any rank is raised on all; inside there is no collective."""
    error: BaseException | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    raise_on_all_ranks(error)


def raise_on_all_ranks(error: BaseException | None) -> None:
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
    befell every third run, `destroy_process_group()` or not. A main thread that sleeps leaves the lock to them. Can go
    with https://github.com/pytorch/pytorch/issues/190489.
    """
    if "gloo" in str(torch_dist.get_backend_config()):
        atexit.register(time.sleep, GLOO_EXIT_DELAY_S)
