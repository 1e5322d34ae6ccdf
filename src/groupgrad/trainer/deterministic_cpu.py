"""Deterministic sums on CPUs, so that two runs with one seed are bitwise equal.

By default PyTorch's threads add values with the same index in the order in which they arrive. This package's code
avoids such sums; the code of some models has them (mixtures of experts).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import deterministic


@contextmanager
def deterministic_cpu(model: nn.Module) -> Iterator[None]:
    """Inside, PyTorch uses deterministic algorithms, if all of `model` is on CPUs and the user has not set them.

    An operation without such an algorithm warns and runs as usual. The setting is global and restored afterwards.
    """
    is_enabled = torch.are_deterministic_algorithms_enabled()
    if is_enabled or any(p.device.type != "cpu" for p in model.parameters()):
        yield
        return
    # By default this mode also fills the memory of new tensors, which costs time and is not needed here.
    settings: Any = deterministic
    fills_memory, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False, warn_only=warn_only)
        settings.fill_uninitialized_memory = fills_memory
