"""Free memory of a device, within the limit of the process's container."""

from __future__ import annotations

import os
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
