"""The format of pushed weights: flags of the server, tensor specs, buckets with a checksum, files in shared memory."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BACKEND = "groupgrad"
"""Name of the backend, and of the plugin."""

TRANSFER_CONFIG = json.dumps({"backend": BACKEND})
"""Value of vLLM's `--weight-transfer-config`."""

FLAGS = ("--weight-transfer-config", TRANSFER_CONFIG, "--middleware", "groupgrad.integrations.vllm.server.Routes")
"""Arguments that make `vllm serve` a server for groupgrad's trainers."""

PROTOCOL = 6
"""Version of the routes under `/groupgrad` and of their payloads.

Raise it by one with each change that an older trainer or server would misread.
"""

AS_LOADED = "as loaded"
"""Version of the weights that a server read from disk when it started."""

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes, so that it can be read in place."""

BUCKET_BYTES = 256 * 2**20
"""A bucket holds tensors up to this size; a longer tensor has a bucket of its own."""

SHARED_MEMORY = Path("/dev/shm")
"""Directory in memory that all processes of a machine (and of a container) share."""

_WORDS_AT_A_TIME = 1 << 21
_FACTOR = 0x5851F42D4C957F2D


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor, announced before its bytes are sent."""

    name: str
    """As in a checkpoint of the model."""
    dtype: str
    """A torch dtype's name, such as `bfloat16`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Length of the tensor's data."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(slots=True, frozen=True)
class Bucket:
    """Consecutive tensors in the order of their announcement, each padded with zeros to `ALIGNMENT` bytes."""

    first: int
    """Index of the first tensor in the announcement."""
    count: int
    """Number of tensors."""
    data: torch.Tensor
    """(bytes,) uint8, on the device that sends it."""
    checksum: int
    """`running_checksum` of this bucket's bytes and of all buckets before it."""


def model_sizes(config: Any) -> dict[str, Any]:
    """The class and two sizes in a transformers config, by which models differ that are mistaken for each other."""
    text = config.get_text_config()
    architectures = getattr(config, "architectures", None) or [None]
    sizes = {name: getattr(text, name, None) for name in ("hidden_size", "num_hidden_layers")}
    return {"architecture": architectures[0], **sizes}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype with this name. ValueError for any other word."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype, such as 'bfloat16'")
    return dtype


def specs_of(metadata: Iterable[Any], dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """Specs of a `WeightSource`'s metadata; floating-point tensors are announced in `dtype` (None: as they are)."""
    specs = []
    for meta in metadata:
        announced = dtype if dtype is not None and meta.dtype.is_floating_point else meta.dtype
        specs.append(TensorSpec(meta.name, str(announced).removeprefix("torch."), tuple(meta.shape)))
    return specs


def specs_to_json(specs: Iterable[TensorSpec]) -> list[list[Any]]:
    """Specs as plain lists."""
    return [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]


def specs_from_json(lists: Iterable[list[Any]]) -> list[TensorSpec]:
    """Inverse of `specs_to_json`. ValueError or TypeError for lists that are of no tensors."""
    specs = [TensorSpec(str(name), str(dtype), tuple(int(size) for size in shape)) for name, dtype, shape in lists]
    for spec in specs:
        torch_dtype(spec.dtype)
        if any(size < 0 for size in spec.shape):
            raise ValueError(f"{spec.name} has the shape {spec.shape}")
    return specs


def as_announced(specs: Sequence[TensorSpec], weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """The tensors, taken one by one. RuntimeError if their names or shapes are not those of the specs, ValueError if
    their number is not."""
    for number, (spec, (name, tensor)) in enumerate(zip(specs, weights, strict=True)):
        if (name, tuple(tensor.shape)) != (spec.name, spec.shape):
            raise RuntimeError(
                f"tensor {number} is {name} of shape {tuple(tensor.shape)}, but {spec.name} of shape {spec.shape} was "
                "announced"
            )
        yield tensor


def pack(
    specs: Sequence[TensorSpec],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    device: torch.device | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[Bucket]:
    """Buckets of the tensors on `device` (None: the CPU), cast to the announced dtypes.

    Tensors are taken one by one as buckets are consumed. Errors are those of `as_announced`.
    """
    tensors = as_announced(specs, weights)
    checksum = 0
    for first, end in bucket_ranges(specs, bucket_bytes):
        bucket_specs = specs[first:end]
        data = torch.zeros(padded_bytes(bucket_specs), dtype=torch.uint8, device=device)
        for (_, place), tensor in zip(unpack(bucket_specs, data), tensors):
            place.copy_(tensor.detach())
        checksum = running_checksum(data, checksum)
        yield Bucket(first, end - first, data, checksum)
    for _ in tensors:  # none is left
        pass


def bucket_ranges(specs: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """First and last+1 index of the tensors in each bucket; a tensor longer than a bucket has one of its own."""
    first = num_bytes = 0
    for index, spec in enumerate(specs):
        # An empty tensor starts no bucket: it would be one without data.
        if index > first and spec.num_bytes and num_bytes + spec.num_bytes > bucket_bytes:
            yield first, index
            first, num_bytes = index, 0
        num_bytes += padded_bytes([spec])
    if specs:
        yield first, len(specs)


def padded_bytes(specs: Iterable[TensorSpec]) -> int:
    """Length of a bucket with these tensors."""
    return sum(spec.num_bytes + -spec.num_bytes % ALIGNMENT for spec in specs)


def unpack(specs: Iterable[TensorSpec], data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors by name, as views of `data`. ValueError if the specs need fewer or more bytes."""
    tensors, offset = [], 0
    for spec in specs:
        end = offset + spec.num_bytes
        if end > len(data):
            raise ValueError(f"a bucket of {len(data)} bytes ends inside the tensor {spec.name}")
        tensors.append((spec.name, data[offset:end].view(torch_dtype(spec.dtype)).view(spec.shape)))
        offset += padded_bytes([spec])
    if offset != len(data):
        raise ValueError(f"a bucket has {len(data)} bytes, but its tensors have {offset}")
    return tensors


def running_checksum(data: torch.Tensor, before: int = 0) -> int:
    """Checksum of (bytes,) uint8 data and of all data `before` it: CRC-32 on the CPU, `digest` on other devices."""
    return zlib.crc32(data.numpy().data, before) if data.device.type == "cpu" else digest(data, before)


def digest(data: torch.Tensor, before: int = 0) -> int:
    """A 64-bit checksum computed on the data's device, which any changed bit changes.

    `data` is (bytes,) uint8, a multiple of 8 long. The checksum is a sum modulo 2^64 of 64-bit words, each times an odd
    weight. An odd weight has an inverse, so a change of one word always changes the sum. The weights differ, so
    exchanged words are missed only by rare chance.
    """
    words = data.view(torch.int64)
    total = torch.tensor(before - 2**64 if before >= 2**63 else before, dtype=torch.int64, device=data.device)
    weights = torch.arange(min(len(words), _WORDS_AT_A_TIME), dtype=torch.int64, device=data.device)
    weights = (weights * _FACTOR) | 1
    for start in range(0, len(words), _WORDS_AT_A_TIME):
        part = words[start : start + _WORDS_AT_A_TIME]
        total = total * _FACTOR + (part * weights[: len(part)]).sum()
    return int(total) % 2**64


@contextlib.contextmanager
def shared_file(data: bytes | memoryview) -> Iterator[str]:
    """Name of a file in shared memory with these bytes, readable by this user's processes and removed afterwards.

    Existing mappings of it stay valid. OSError if it cannot be written.
    """
    path = SHARED_MEMORY / f"groupgrad-{uuid.uuid4().hex}"
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def read_shared(name: str) -> mmap.mmap:
    """Maps a `shared_file` without a copy; writes stay private to this process. OSError if the file is gone."""
    if not re.fullmatch(r"groupgrad-[0-9a-f]{32}", name):
        raise OSError(f"{name!r} is not the name of a bucket of weights")
    with open(SHARED_MEMORY / name, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def remove_stale() -> None:
    """Removes files of this user's trainers that were killed during a push, an hour ago or more."""
    for path in SHARED_MEMORY.glob("groupgrad-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and time.time() - path.stat().st_mtime > 3600:
                path.unlink()
