"""Measures the memory that a round takes, over all ranks that share a machine or an accelerator."""

from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from groupgrad import dist


@dataclass(slots=True, frozen=True)
class Usage:
    """Memory that ranks of one machine or accelerator have used, in bytes."""

    place: str
    """Name of the machine, with that of the accelerator if there is one."""
    is_accelerator: bool
    peak_bytes: int
    """The most during the round: the sum over the ranks of each one's peak."""
    before_bytes: int
    """The memory that they had when the round began."""
    total_bytes: int
    """All memory of the machine or accelerator."""
    num_ranks: int = 1


class MemoryWatch:
    """Measures this rank's memory from its creation on: the tensors on an accelerator, on a CPU the whole process."""

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            _forget_peak()
            self._before = psutil.Process().memory_info().rss

    def fullest(self) -> tuple[Usage, int]:
        """Returns the usage of the machine or accelerator that is closest to full, and their number. Collective."""
        host, device = socket.gethostname(), self._device
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            # Each process may see its own device alone, as number 0.
            place, total = f"{host} {getattr(properties, 'uuid', device)}", properties.total_memory
            usage = Usage(place, True, torch.cuda.max_memory_allocated(device), self._before, total)
        else:
            usage = Usage(host, False, _peak_bytes(), self._before, psutil.virtual_memory().total)
        return fullest(dist.all_gather_objects(usage))


def fullest(usages: Iterable[Usage]) -> tuple[Usage, int]:
    """Adds the usages of ranks by their place; returns the one that is closest to full, and the number of places."""
    places: dict[str, Usage] = {}
    for usage in usages:
        usage_there = places.get(usage.place)
        if usage_there is not None:
            usage = replace(
                usage,
                peak_bytes=usage_there.peak_bytes + usage.peak_bytes,
                before_bytes=usage_there.before_bytes + usage.before_bytes,
                num_ranks=usage_there.num_ranks + usage.num_ranks,
            )
        places[usage.place] = usage
    return max(places.values(), key=lambda usage: usage.peak_bytes / usage.total_bytes), len(places)


def _forget_peak() -> None:
    """Resets this process's peak memory to its present memory; does nothing outside Linux."""
    with suppress(OSError):  # then the peak since its start counts, an upper bound
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Returns the most resident memory of this process since `_forget_peak`."""
    present = psutil.Process().memory_info()
    unit = 1 if sys.platform == "darwin" else 1024
    return max(present.rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
