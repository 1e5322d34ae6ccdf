"""Free memory of a device, within the limit of the process's container, and memory that glibc keeps to itself."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import psutil
import torch

_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files of both versions of control groups with the limit, the usage and statistics, and the entry of cached files."""


def free_bytes(device: torch.device) -> int:
    """Free bytes on `device` for new tensors of this process.

    On a CPU this is at most what the process's control group (cgroup) allows, divided among the machine's ranks.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = min(psutil.virtual_memory().available, _cgroup_free_bytes())
    return free // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def used_bytes(device: torch.device) -> int:
    """Bytes of tensors of this process on a CUDA device; 0 on other devices, where they are not counted."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _cgroup_free_bytes() -> int:
    """Bytes left below a container's memory limit, cached files included; 2^62 without a limit."""
    for *names, cached in _CGROUP_FILES:
        limit, usage, statistics = (Path("/sys/fs/cgroup", name) for name in names)
        try:
            bound = limit.read_text().strip()
            if bound.isdigit():  # "max" without a limit
                lines = dict(line.split(maxsplit=1) for line in statistics.read_text().splitlines())
                return max(int(bound) - int(usage.read_text()) + int(lines.get(cached, "0")), 0)
        except OSError:
            continue
    return 1 << 62


_MUCH_FREE = 64 * 2**20
"""Free bytes of the heap from which on `return_free_memory` returns them; fewer are not worth the new pages."""


class _HeapSizes(ctypes.Structure):
    """glibc's `struct mallinfo2`. `fordblks` is the free bytes of all arenas, also those whose pages were returned."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def return_free_memory() -> None:
    """Gives the free memory of the heap back to the system where glibc counts at least 64 MB of it.

    glibc takes tensors of up to 32 MB from one heap, and returns only the heap's end by itself, after the last block in
    use. A process has its peak in the backward pass: gradients above 32 MB get mappings of their own, and cannot use
    blocks that the forward pass has left in the heap. The call does nothing with a glibc older than 2.33, without
    glibc, or where the environment configures glibc's allocator.
    """
    library = _glibc()
    heap_sizes = getattr(library, "mallinfo2", None)
    if library is not None and heap_sizes is not None:
        heap_sizes.restype = _HeapSizes
        if heap_sizes().fordblks >= _MUCH_FREE:
            library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library of this process; None if it is not glibc or the environment sets its allocator."""
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ):
        return None
    try:
        library = ctypes.CDLL(None)
        return library if library.gnu_get_libc_version and library.malloc_trim else None
    except (OSError, TypeError, AttributeError):  # no such library, or another C library
        return None
