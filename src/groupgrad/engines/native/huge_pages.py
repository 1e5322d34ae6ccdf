"""Large tensors of a CPU in pages of two megabytes.

A decode step reads all keys and values once. With pages of four kilobytes it looks up the address of a page every
sixteen keys, and a virtual machine walks two tables for each. By default Linux gives large pages only to memory that
asks for them (`/sys/kernel/mm/transparent_hugepage/enabled`).
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch

PAGE = 2 * 2**20
"""Bytes of a large page, and of the smallest tensor that gets one."""


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros. A large one on a Linux CPU gets a mapping of its own, for which large pages are requested."""
    num_bytes = math.prod(size) * dtype.itemsize
    mapped = _mapped(num_bytes) if device.type == "cpu" and num_bytes >= PAGE else None
    return torch.zeros(*size, dtype=dtype, device=device) if mapped is None else mapped.view(dtype).view(*size)


def _mapped(num_bytes: int) -> torch.Tensor | None:
    """Bytes that begin at a large page, which the system clears when they are first written; None without support."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # the kernel has no large pages, or no memory, which torch will report
        return None
    every = torch.frombuffer(memory, dtype=torch.uint8)
    start = -every.data_ptr() % PAGE
    return every[start : start + num_bytes]
