"""How weights travel: what is announced, how tensors lie in a bucket, and the checksum that both sides compute."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ALIGNMENT = 64
"""Every tensor begins at a multiple of this many bytes, so that it can be read where it lies."""

BUCKET_BYTES = 256 * 2**20
"""A bucket is sent when the next tensor would make it longer than this; a longer tensor has a bucket of its own."""


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """What is announced of a tensor before its bytes are sent."""

    name: str
    """As in a checkpoint of the model."""
    dtype: str
    """A torch dtype's name, such as `bfloat16`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Length of the tensor's data."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * torch_dtype(self.dtype).itemsize


@dataclass(slots=True, frozen=True)
class Bucket:
    """Tensors end to end, in the order in which they were announced."""

    number: int
    """0, 1, 2, ... within a push."""
    first: int
    """Place in the announcement of the first tensor."""
    count: int
    """Number of tensors."""
    data: bytearray
    checksum: int
    """CRC-32 of this bucket's bytes and those of all before it."""


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "tie_word_embeddings",
)


def model_sizes(config: Any) -> dict[str, Any]:
    """What tells a model from another by its transformers config: `architecture`, and those sizes that it names."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {name: getattr(text, name) for name in _SIZES if isinstance(getattr(text, name, None), int)}
    architectures = getattr(config, "architectures", None) or [None]
    return {"architecture": architectures[0], **found}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name. ValueError for any other word."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype, such as 'bfloat16'")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` gives `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def notes_as_lists(notes: Iterable[TensorSpec]) -> list[list[Any]]:
    """Notes as plain lists, for JSON."""
    return [[note.name, note.dtype, list(note.shape)] for note in notes]


def notes_from_lists(lists: Iterable[list[Any]]) -> list[TensorSpec]:
    """Notes out of plain lists."""
    return [TensorSpec(str(name), str(dtype), tuple(int(size) for size in shape)) for name, dtype, shape in lists]


def pack(
    notes: list[TensorSpec], tensors: Iterable[torch.Tensor], *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Buckets of the tensors, cast to the dtypes announced; tensors are taken one by one, as buckets are asked for.

    RuntimeError if the tensors are not those of the notes.
    """
    data, first, number, checksum = bytearray(), 0, 0, 0
    place = -1
    for place, tensor in enumerate(tensors):
        note = notes[place] if place < len(notes) else None
        if note is None or tuple(tensor.shape) != note.shape:
            expected = "no more tensors" if note is None else f"{note.name} of shape {note.shape}"
            raise RuntimeError(f"tensor {place} has the shape {tuple(tensor.shape)}, but {expected} was announced")
        if data and len(data) + note.num_bytes > bucket_bytes:
            checksum = zlib.crc32(data, checksum)
            yield Bucket(number, first, place - first, data, checksum)
            data, first, number = bytearray(), place, number + 1
        data += bytes(-len(data) % ALIGNMENT)
        data += _bytes_of(tensor.detach().to("cpu", torch_dtype(note.dtype)))
    if place + 1 != len(notes):
        raise RuntimeError(f"{len(notes)} tensors were announced, but only {place + 1} came")
    if place >= first:
        yield Bucket(number, first, place + 1 - first, data, zlib.crc32(data, checksum))


SHARED_MEMORY = Path("/dev/shm")
"""Where files lie in memory that all processes of a machine (and of a container) see."""


def write_shared(data: bytes | bytearray) -> str:
    """Put bytes where other processes of this user on this machine can read them; gives the name. OSError if it cannot
    be done; whoever wrote them removes them."""
    name = f"groupgrad-{uuid.uuid4().hex}"
    with open(SHARED_MEMORY / name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(data)
    return name


def read_shared(name: str) -> mmap.mmap:
    """Those bytes, without copying them; writing changes this process's view alone. OSError if they are not there."""
    if not re.fullmatch(r"groupgrad-[0-9a-f]{32}", name):
        raise OSError(f"{name!r} is not the name of a bucket of weights")
    with open(SHARED_MEMORY / name, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def remove_stale(older_than_s: float = 3600.0) -> None:
    """Forget what this user's trainers left behind when they were killed in the middle of a push."""
    for path in SHARED_MEMORY.glob("groupgrad-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and time.time() - path.stat().st_mtime > older_than_s:
                path.unlink()


def remove_shared(name: str) -> None:
    """Forget them; who reads them still can go on."""
    (SHARED_MEMORY / name).unlink(missing_ok=True)


def unpack(notes: Iterable[TensorSpec], data: Any) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors by name. ValueError if the bytes are fewer or more than the notes say.

    The tensors lie in `data` if that can be written to, otherwise in a copy.
    """
    writable = bytearray(data) if isinstance(data, bytes) else data
    found, offset = [], 0
    for note in notes:
        offset += -offset % ALIGNMENT
        end = offset + note.num_bytes
        if end > len(writable):
            raise ValueError(f"a bucket of {len(writable)} bytes ends inside the tensor {note.name}")
        dtype = torch_dtype(note.dtype)
        if note.num_bytes:
            flat = torch.frombuffer(writable, dtype=dtype, offset=offset, count=note.num_bytes // dtype.itemsize)
        else:
            flat = torch.empty(0, dtype=dtype)
        found.append((note.name, flat.view(note.shape)))
        offset = end
    if offset != len(writable):
        raise ValueError(f"a bucket has {len(writable)} bytes, but its tensors have {offset}")
    return found


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
