"""The devices that the arms of a sweep are spread over, each with a worker process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FORMS = "set it to a number of devices, to a list of GPUs such as [0, 1], or to all for one worker for each GPU"


@dataclass(slots=True, frozen=True)
class Device:
    """A device with a worker process."""

    name: str
    environment: Mapping[str, str]
    """Variables of the process, set before it imports torch."""


def find_devices(given: Any, *, on_cpu: bool) -> list[Device]:
    """The devices that `devices` names; none if it is None. Without a GPU, or `on_cpu`, a number of processes is meant.

    ValueError for what is no device of this machine.
    """
    if given is None:
        return []
    wanted = _read(given)
    import torch

    num_gpus = 0 if on_cpu else torch.cuda.device_count()
    if not num_gpus:
        return _processes(wanted, given, torch.get_num_threads(), on_cpu=on_cpu)
    if isinstance(wanted, list):
        indices: Sequence[int] = wanted
    else:
        indices = range(wanted if isinstance(wanted, int) else num_gpus)
    missing = [index for index in indices if index >= num_gpus]
    if missing:
        visible = "GPU 0 alone is visible" if num_gpus == 1 else f"GPUs 0 to {num_gpus - 1} are visible"
        raise ValueError(f"devices={given!r} needs GPU {missing[-1]}, but {visible} here; name fewer, or set it to all")
    # A process may see a part of the machine's GPUs, which are then numbered anew.
    visible_names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = visible_names or [str(index) for index in range(num_gpus)]
    return [Device(f"GPU {index}", {"CUDA_VISIBLE_DEVICES": names[index]}) for index in indices]


def _read(given: Any) -> str | int | list[int]:
    """`all`, a number of devices or their indices. A text holds the same, `0,2` for indices."""
    value = given
    if isinstance(given, str) and given != "all":
        parts = [part.strip() for part in given.strip("[]").split(",")]
        if all(part.isdecimal() for part in parts):
            value = [int(part) for part in parts] if "," in given or "[" in given else int(parts[0])
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"devices={given!r} names no device; {_FORMS}")
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in value):
        raise ValueError(f"devices={given!r} holds something else than indices of GPUs; {_FORMS}")
    repeated = next((index for place, index in enumerate(value) if index in value[:place]), None)
    if repeated is not None:
        raise ValueError(f"devices={given!r} names GPU {repeated} twice, and a GPU has one worker; name it once")
    return list(value)


def _processes(wanted: str | int | list[int], given: Any, num_threads: int, *, on_cpu: bool) -> list[Device]:
    if not isinstance(wanted, int):
        why = "the sweep trains on the CPU (use_cpu)" if on_cpu else "no GPU is visible"
        raise ValueError(f"devices={given!r} names GPUs, but {why}; set it to a number of worker processes")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if wanted > cores:
        raise ValueError(f"devices={given!r} is more than the {cores} cores of this machine; set it to at most {cores}")
    # As many threads as this process has: another number could change the order of sums, and so bits.
    environment = {"OMP_NUM_THREADS": str(num_threads)}
    return [Device(f"process {number}", environment) for number in range(1, wanted + 1)]
