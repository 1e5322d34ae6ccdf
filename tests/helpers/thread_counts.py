"""Sets the number of threads that torch and the kernels use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many torch, and so the kernels, may use; as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
