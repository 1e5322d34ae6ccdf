"""A process group of the rank that pushes weights and the workers of a server, and what is sent over it.

It is a group by itself, beside those of training and of vLLM: its ranks are the trainer (0) and the workers (1, 2,
...), which meet at a port of the server's machine. Both sides use torch's own classes, so the trainer needs no vLLM.
Tensors stay on their device: they are packed, sent, checked and unpacked there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as torch_dist

from groupgrad.engines.vllm.wire import ALIGNMENT, BUCKET_BYTES, TensorSpec, torch_dtype

Backend = Literal["nccl", "gloo"]

POLL_S, MEETING_POLL_S = 0.001, 0.02
_WORDS_AT_A_TIME = 1 << 21
_FACTOR = 0x5851F42D4C957F2D


class GroupBroken(ConnectionError):
    """What was sent over the group did not arrive, or nobody was met."""


@dataclass(slots=True, frozen=True)
class DeviceBucket:
    """Tensors end to end on a device, each at a multiple of `ALIGNMENT` bytes, zeros up to the next one at the end."""

    number: int
    """0, 1, 2, ... within a push."""
    first: int
    """Place in the announcement of the first tensor."""
    count: int
    """Number of tensors."""
    data: torch.Tensor
    """(bytes,) uint8."""
    checksum: int
    """`digest` of this bucket's bytes and those of all before it."""


class WeightGroup:
    """One rank's end of the group; `store` is of `open_store`. GroupBroken if the others do not come in time."""

    def __init__(
        self,
        backend: Backend,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        device: torch.device | None = None,
    ):
        self._timeout = timedelta(seconds=timeout_s)
        self.device = device or torch.device("cpu")
        self._store = store
        self._group: Any = None
        try:
            _meet(store, rank, size, self._timeout)
            self._group = _make(backend, store, rank, size, self._timeout)
            # NCCL connects when something is sent.
            hello = torch.full((1,), rank, dtype=torch.uint8, device=self.device)
            self._group.broadcast(hello, 0, self._timeout).wait(self._timeout)
        except (RuntimeError, OSError) as error:
            raise GroupBroken(f"rank {rank} of {size} met nobody over {backend}: {error}") from None
        if int(hello[0]):
            raise GroupBroken(f"rank {rank} of {size} got {int(hello[0])} over {backend} where 0 was sent")

    def send(self, data: torch.Tensor, problem: Callable[[], Exception | None]) -> None:
        """Rank 0: give the bytes to all others. `problem` says why they will not take them, which is raised then;
        GroupBroken if they do not in time."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            work = self._group.broadcast(data, 0, self._timeout)
            while not work.is_completed():
                error = problem()
                if error is not None:
                    raise error
                if time.monotonic() > deadline:
                    raise GroupBroken(f"{len(data)} bytes were not taken within {self._timeout.total_seconds():g} s")
                time.sleep(POLL_S)
            work.wait(self._timeout)
        except RuntimeError as error:
            raise GroupBroken(f"{len(data)} bytes were not sent: {error}") from None

    def receive(self, num_bytes: int) -> torch.Tensor:
        """Other ranks: the bytes that rank 0 sends next. GroupBroken if they do not come in time."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        try:
            self._group.broadcast(data, 0, self._timeout).wait(self._timeout)
        except RuntimeError as error:
            raise GroupBroken(f"{num_bytes} bytes did not come: {error}") from None
        return data

    def close(self) -> None:
        """Let go, whatever is under way."""
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            self._group.abort()
        self._group = self._store = None


def describe(device: torch.device) -> dict[str, Any]:
    """What decides whether two processes can meet over NCCL: their devices' ids and NCCL's release; None on a CPU."""
    if device.type != "cuda":
        return {"device": None, "nccl": None}
    return {
        "device": str(getattr(torch.cuda.get_device_properties(device), "uuid", device)),
        "nccl": list(torch.cuda.nccl.version()),  # pyright: ignore[reportAttributeAccessIssue]
    }


def open_store(host: str, port: int, *, serves: bool, timeout_s: float) -> Any:
    """Where the ranks meet. GroupBroken, with the port, if it is taken or nobody opens it in time."""
    try:
        return torch_dist.TCPStore(
            host, port, is_master=serves, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        what = "cannot be opened" if serves else "was not reached"
        raise GroupBroken(
            f"port {port} of {host}, where trainer and server meet to transfer weights, {what}: {error}; set "
            "vllm_group_port to a free port that both machines reach"
        ) from None


def _meet(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until all ranks are about to form the group; RuntimeError if they are not in time.

    Forming it alone would block in native code, in a thread that nobody can stop, and a process has died of that while
    it went on without the group.
    """
    store.set(f"here/{rank}", "")
    others = [f"here/{number}" for number in range(size)]
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(others):
        if time.monotonic() > deadline:
            missing = [number for number in range(size) if not store.check([f"here/{number}"])]
            raise RuntimeError(f"ranks {missing} did not come within {timeout.total_seconds():g} s")
        time.sleep(MEETING_POLL_S)


def _make(backend: Backend, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if backend == "gloo":
        return torch_dist.ProcessGroupGloo(store, rank, size, timeout)
    options = torch_dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timeout
    return torch_dist.ProcessGroupNCCL(store, rank, size, options)  # pyright: ignore[reportAttributeAccessIssue]


def digest(data: torch.Tensor, before: int = 0) -> int:
    """A number of 64 bits that any changed bit changes; of bytes on any device, and of all that came `before`.

    `data` is (bytes,) uint8, a multiple of 8 long. Words are weighted by odd numbers modulo 2^64, so that no single
    change is lost, and no exchange of parts but by rare chance.
    """
    words = data.view(torch.int64)
    total = torch.tensor(_signed(before), dtype=torch.int64, device=data.device)
    weights = torch.arange(min(len(words), _WORDS_AT_A_TIME), dtype=torch.int64, device=data.device)
    weights = (weights * _FACTOR) | 1
    for start in range(0, len(words), _WORDS_AT_A_TIME):
        part = words[start : start + _WORDS_AT_A_TIME]
        total = total * _FACTOR + (part * weights[: len(part)]).sum()
    return int(total) % 2**64


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def pack_on(
    device: torch.device, notes: list[TensorSpec], tensors: Iterable[torch.Tensor], *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[DeviceBucket]:
    """Buckets of the tensors, cast to the dtypes announced; tensors are taken one by one, as buckets are asked for.

    RuntimeError if the tensors are not those of the notes.
    """
    parts: list[torch.Tensor] = []
    first = number = checksum = num_bytes = 0
    place = -1
    for place, tensor in enumerate(tensors):
        note = notes[place] if place < len(notes) else None
        if note is None or tuple(tensor.shape) != note.shape:
            expected = "no more tensors" if note is None else f"{note.name} of shape {note.shape}"
            raise RuntimeError(f"tensor {place} has the shape {tuple(tensor.shape)}, but {expected} was announced")
        if parts and num_bytes + note.num_bytes > bucket_bytes:
            data = torch.cat(parts)
            checksum = digest(data, checksum)
            yield DeviceBucket(number, first, place - first, data, checksum)
            parts, num_bytes, first, number = [], 0, place, number + 1
        flat = tensor.detach().to(device, torch_dtype(note.dtype)).contiguous().view(-1).view(torch.uint8)
        parts += [flat, flat.new_zeros(-len(flat) % ALIGNMENT)]
        num_bytes += len(flat) + len(parts[-1])
    if place + 1 != len(notes):
        raise RuntimeError(f"{len(notes)} tensors were announced, but only {place + 1} came")
    if place >= first:
        data = torch.cat(parts)
        yield DeviceBucket(number, first, place + 1 - first, data, digest(data, checksum))


def unpack_from(notes: Iterable[TensorSpec], data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors by name, where they lie. ValueError if the bytes are fewer or more than the notes say."""
    found, offset = [], 0
    for note in notes:
        end = offset + note.num_bytes
        if end > len(data):
            raise ValueError(f"a bucket of {len(data)} bytes ends inside the tensor {note.name}")
        found.append((note.name, data[offset:end].view(torch_dtype(note.dtype)).view(note.shape)))
        offset = end + -end % ALIGNMENT
    if offset != len(data):
        raise ValueError(f"a bucket has {len(data)} bytes, but its tensors have {offset}")
    return found
