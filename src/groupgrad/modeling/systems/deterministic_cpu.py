"""Sums in a fixed order, so that two runs of a seed are equal to the last bit on a CPU.

PyTorch's threads add what goes to one place in the order in which they come by, unless deterministic algorithms are
asked for. groupgrad's own code does not leave it to them; the code of some models does (mixtures of experts).
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
    """PyTorch's deterministic algorithms inside, if all of `model` lies on CPUs and they are not asked for already.

    An operation without such a form warns and runs as ever. The setting is the process's, and restored afterwards.
    """
    is_asked = torch.are_deterministic_algorithms_enabled()
    if is_asked or any(p.device.type != "cpu" for p in model.parameters()):
        yield
        return
    # The memory of new tensors is filled otherwise, which costs time and changes nothing here.
    memory: Any = deterministic
    fills, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False, warn_only=warns)
        memory.fill_uninitialized_memory = fills
