"""Collective operations between ranks. Without a process group every function acts as a single rank.

Every rank must call a collective the same number of times, even with nothing to send.
"""

from __future__ import annotations

import atexit
import datetime
import inspect
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed import distributed_c10d

from groupgrad.activity import WAITING, Hung, doing
from groupgrad.errors import RankError
from groupgrad.stopping import StopRequested, interruptible

T = TypeVar("T")
TensorT = TypeVar("TensorT", bound=torch.Tensor)

BUCKET_BYTES = 25 * 2**20
"""Size of the buckets in which small gradients are reduced together."""

LARGE_BYTES = 2**20
"""Size from which a gradient is reduced alone and in place, since a copy would cost more than a call."""

_AGREED = "_groupgrad_on_all_ranks"

MAX_PAUSE_S = 1e-3
"""Longest pause between two looks at a gloo collective that is waited for."""

GLOO_EXIT_DELAY_S = 0.25
"""Time that a process with a gloo group sleeps before its interpreter shuts down."""


def is_active() -> bool:
    """True if several ranks train together."""
    return torch_dist.is_available() and torch_dist.is_initialized() and torch_dist.get_world_size() > 1


def world_size() -> int:
    """Number of ranks."""
    return torch_dist.get_world_size() if is_active() else 1


def rank() -> int:
    """Index of this process, 0 to world_size-1."""
    return torch_dist.get_rank() if is_active() else 0


def is_main() -> bool:
    """True on rank 0."""
    return rank() == 0


def limit_waiting(seconds: float) -> None:
    """Sets how long a collective waits for the other ranks before it is an error.

    Without it a group of CPU processes waits as long as PyTorch's default says, whatever the configuration.
    """
    if is_active():
        distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), None)


def all_gather_objects(obj: T, group: Any = None) -> list[T]:
    """Gathers one picklable object from each rank of the group (default: all), in rank order. Collective."""
    return _gathered(obj, group) if is_active() else [obj]


def _gathered(obj: T, group: Any) -> list[T]:
    """`all_gather_objects` of several ranks. Collective."""
    _sleep_at_exit()
    gathered: list[Any] = [None] * torch_dist.get_world_size(group)
    with doing(WAITING):
        _meet(group)
        torch_dist.all_gather_object(gathered, obj, group=group)
    return gathered


def _meet(group: Any) -> None:
    """Waits in Python for the other ranks of a gloo group, so that an error raised by another thread ends the wait.

    gloo's own wait ends with its timeout only. Collective.
    """
    if "gloo" not in str(torch_dist.get_backend_config(group)):
        return
    work: Any = torch_dist.barrier(group, async_op=True)
    pause_s = 0.0
    while not work.is_completed():
        time.sleep(pause_s)
        pause_s = min(pause_s + 2e-5, MAX_PAUSE_S)
    work.wait()


def all_gather_rows(values: torch.Tensor) -> torch.Tensor:
    """Concatenates the rows of all ranks in rank order. Collective.

    `values` is (B, ...) with the same trailing shape and dtype on all ranks; B may differ. No gradient flows.
    """
    if not is_active():
        return values
    return torch.cat(all_gather_objects(values.detach().cpu())).to(values.device)


def exchange_objects(outgoing: Mapping[int, T], routes: Sequence[tuple[int, int]]) -> dict[int, T]:
    """Sends one picklable object to each rank of `outgoing`; returns what each sender has sent here. Collective.

    `routes` are all pairs (sender, receiver), in the same order on all ranks, which call this even if none is theirs.
    """
    received: dict[int, T] = {}
    options = _object_options() if routes else {}
    for sender, receiver in routes:
        if sender == rank():
            torch_dist.send_object_list([outgoing[receiver]], dst=receiver, **options)
        elif receiver == rank():
            parts: list[Any] = [None]
            torch_dist.recv_object_list(parts, src=sender, **options)
            received[sender] = parts[0]
    return received


def _object_options() -> dict[str, Any]:
    """Arguments with which objects are sent over the group's own NCCL communicator.

    By default each pair of ranks gets a communicator of its own, which takes time to connect and memory on both
    devices. Older releases of torch have no other way.
    """
    takes_batch = "use_batch" in inspect.signature(torch_dist.send_object_list).parameters
    return {"use_batch": True} if takes_batch and "nccl" in str(torch_dist.get_backend_config()) else {}


@dataclass(slots=True, frozen=True)
class RankGroup:
    """Consecutive ranks that compute the same rows together, in the order of a ring."""

    ranks: tuple[int, ...]
    """The ranks of the group, ascending."""
    handle: Any
    """The process group of PyTorch."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Place of this rank in the group, 0 to size-1."""
        return self.ranks.index(rank())


def consecutive_groups(size: int, *, timeout_s: float) -> RankGroup:
    """Cuts the ranks into groups of `size` consecutive ones, and returns this rank's. Collective.

    `size` divides the number of ranks. A wait of the group for more than `timeout_s` seconds is an error.
    """
    groups = []
    for first in range(0, world_size(), size):  # every rank takes part in making every group
        ranks = tuple(range(first, first + size))
        limit = datetime.timedelta(seconds=timeout_s)
        groups.append(RankGroup(ranks, torch_dist.new_group(list(ranks), timeout=limit)))
    return groups[rank() // size]


class RingHop:
    """Sends tensors to the next rank of a ring and receives the previous rank's. Collective in the group.

    `sent` are (H, T, ...); the received tensors are (H, `num_tokens`, ...). The transfer runs until `wait`. Hops that
    run at the same time need different values of `channel`.
    """

    def __init__(self, sent: Sequence[torch.Tensor], num_tokens: int, group: RankGroup, *, channel: int = 0):
        self._sent = [tensor.contiguous() for tensor in sent]
        self._received = [x.new_empty((x.shape[0], num_tokens, *x.shape[2:])) for x in self._sent]
        following, previous = (group.ranks[(group.index + step) % group.size] for step in (1, -1))
        transfers = []
        for number, (out, into) in enumerate(zip(self._sent, self._received), start=channel * len(self._sent)):
            transfers.append(torch_dist.P2POp(torch_dist.isend, out, following, group.handle, number))
            transfers.append(torch_dist.P2POp(torch_dist.irecv, into, previous, group.handle, number))
        self._works = torch_dist.batch_isend_irecv(transfers)

    def wait(self) -> list[torch.Tensor]:
        """The previous rank's tensors, when they have arrived."""
        with doing(WAITING):
            for work in self._works:
                work.wait()
        return self._received


def sum_over_group(values: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The sum of the `values` of the group's ranks, differentiable. Collective, and so is its backward pass.

    Each rank's result depends on each rank's values, so the gradient of the values is the sum of all ranks' gradients
    of the result: that of the sum of all ranks' losses.
    """
    return _GroupSum.apply(values, group)  # pyright: ignore[reportReturnType]


class _GroupSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return _group_sum(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _group_sum(gradient, ctx.group), None


def _group_sum(values: torch.Tensor, group: RankGroup) -> torch.Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    with doing(WAITING):
        torch_dist.all_reduce(total, group=group.handle)
    return total


def all_sum(values: list[float]) -> list[float]:
    """Sums equally long lists of numbers element by element over ranks, in float64. Collective."""
    if not is_active():
        return [float(value) for value in values]
    return [float(sum(column)) for column in zip(*all_gather_objects([float(value) for value in values]))]


def sum_tensor(tensor: torch.Tensor) -> None:
    """Replaces `tensor`, of the same shape and dtype on all ranks, by its sum over ranks. Collective."""
    if is_active():
        _meet(None)
        torch_dist.all_reduce(tensor)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replaces each gradient by its mean over ranks, in its own dtype. Collective.

    A missing gradient counts as 0; a parameter without a gradient on every rank keeps none. The `parameters` of all
    ranks are the same in the same order (RuntimeError if their numbers differ). Small gradients are copied into
    buckets of `bucket_bytes`, so that all of them are never copied at once. Gradients are divided before they are
    summed, which keeps float16 from overflowing. They are sent in the order in which a backward pass makes them.
    """
    if not is_active():
        return
    parameters = list(parameters)
    has_gradient = all_gather_objects(bytes(parameter.grad is not None for parameter in parameters))
    if len({len(flags) for flags in has_gradient}) > 1:
        counts = ", ".join(str(len(flags)) for flags in has_gradient)
        raise RuntimeError(f"the ranks train different parameters: {counts} of them; freeze the same on all")
    gradients: list[torch.Tensor] = []
    for parameter, *flags in zip(reversed(parameters), *map(reversed, has_gradient)):
        if any(flags):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    pending: list[BucketReduce] = []
    for bucket in buckets(gradients, bucket_bytes):
        pending.append(BucketReduce(bucket))
        if len(pending) > 2:  # two buckets are reduced while the next one is filled
            pending.pop(0).wait()
    for reduce in pending:
        reduce.wait()


def buckets(tensors: Sequence[TensorT], max_bytes: int) -> Iterator[list[TensorT]]:
    """Groups tensors of the same dtype and device into buckets of at most `max_bytes`; large tensors stay alone."""
    open_buckets: defaultdict[tuple[torch.dtype, torch.device], list[TensorT]] = defaultdict(list)
    num_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        if tensor.nbytes >= min(LARGE_BYTES, max_bytes):
            yield [tensor]
            continue
        key = tensor.dtype, tensor.device
        if open_buckets[key] and num_bytes[key] + tensor.nbytes > max_bytes:
            yield open_buckets.pop(key)
            num_bytes[key] = 0
        open_buckets[key].append(tensor)
        num_bytes[key] += tensor.nbytes
    yield from open_buckets.values()


class BucketReduce:
    """Asynchronous mean over ranks of tensors with the same dtype and device. Collective."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = tensors
        self._in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        self._flat = tensors[0].view(-1) if self._in_place else torch.cat([t.reshape(-1) for t in tensors])
        self._flat /= world_size()
        self._work: Any = torch_dist.all_reduce(self._flat, async_op=True)

    def wait(self) -> None:
        """Waits for all ranks and writes the mean into the tensors."""
        self._work.wait()
        if not self._in_place:
            means = self._flat.split([tensor.numel() for tensor in self._tensors])
            for tensor, mean in zip(self._tensors, means):
                tensor.copy_(mean.view_as(tensor))


@torch.no_grad()
def broadcast_module(module: nn.Module, *, buffers: bool = True, device: torch.device | None = None) -> None:
    """Overwrites the parameters and buffers of `module` with those of rank 0. Collective.

    Tensors are sent one by one from `device`, which the ranks' backend must serve; None for the one that each is on.

    RuntimeError, on all ranks, if names, shapes, dtypes or frozen parameters differ. Quantized weights of a tensor
    subclass stay as each rank has loaded them.
    """
    if not is_active():
        return
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    if buffers:
        tensors |= dict(module.named_buffers())
    specs = {name: f"{tuple(t.shape)} {t.dtype}{' frozen' * (not t.requires_grad)}" for name, t in tensors.items()}
    for other_rank, other in enumerate(all_gather_objects(specs)):
        if other != specs:
            name = min(key for key in {**specs, **other} if specs.get(key) != other.get(key))
            raise RuntimeError(
                f"ranks {rank()} and {other_rank} have different models: {name} is {specs.get(name, 'missing')} here "
                f"and {other.get(name, 'missing')} there; give the same model to all"
            )
    for tensor in tensors.values():
        if type(tensor.data) is torch.Tensor:
            sent = tensor.data if device is None else tensor.data.to(device)
            broadcast_tensor(sent)
            if sent is not tensor.data:
                tensor.data.copy_(sent)


def broadcast_tensor(tensor: torch.Tensor) -> None:
    """Overwrites `tensor`, of the same shape and dtype on all ranks, with that of rank 0. Collective."""
    if is_active():
        # As bytes, since some backends lack some dtypes.
        flat = tensor.reshape(-1).view(torch.uint8)
        torch_dist.broadcast(flat, src=0)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.dtype).view_as(tensor))


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Raises an exception from the body on all ranks. Collective at its end; the body contains no collective.

    A signal that ends the run leaves the body; then all ranks raise StopRequested.
    """
    error: BaseException | None = None
    try:
        with interruptible():
            yield
    except (Exception, StopRequested, Hung) as caught:
        error = caught
    raise_on_all_ranks(error)


def raise_on_all_ranks(error: BaseException | None) -> None:
    """Raises on all ranks if any of them has an error, so that none waits forever in the next collective. Collective.

    The failed rank raises its own error; the others raise a RankError that quotes it. StopRequested, if no rank has
    another error, is raised on all of them.
    """
    if is_active():
        _raise_agreed(error)
    elif error is not None:
        raise error


def _raise_agreed(error: BaseException | None) -> None:
    """`raise_on_all_ranks` of several ranks. Collective."""
    is_stop = isinstance(error, StopRequested)
    signals, messages = zip(
        *all_gather_objects(
            (str(error) if is_stop else None, None if error is None or is_stop else f"{type(error).__name__}: {error}")
        )
    )
    if error is not None and not is_stop:
        error.__dict__[_AGREED] = True
        raise error
    for failed_rank, message in enumerate(messages):
        if message is not None:
            raise RankError(f"stopped because rank {failed_rank} failed with {message}")
    for name in signals:
        if name is not None:
            raise StopRequested(name) from error


def is_agreed(error: BaseException) -> bool:
    """True for an error that `raise_on_all_ranks` has raised, so that every rank knows of it."""
    return isinstance(error, RankError) or _AGREED in error.__dict__


@cache
def _sleep_at_exit() -> None:
    """Lets gloo's threads release their last tensors before the interpreter shuts down.

    A gloo thread drops its tensors a moment after the collective's callers continue, and takes the interpreter's lock
    to do so. If the main thread has begun to shut down by then, the process aborts ("terminate called without an active
    exception") after its work, and the launcher reports a failure: every third run on two busy cores, with and without
    `destroy_process_group()`. A sleeping main thread leaves the lock to them. Not needed once
    https://github.com/pytorch/pytorch/issues/190489 is fixed.
    """
    if "gloo" in str(torch_dist.get_backend_config()):
        atexit.register(time.sleep, GLOO_EXIT_DELAY_S)
