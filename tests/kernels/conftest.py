"""The compiled kernels, and how many threads they use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from groupgrad.kernels import library, status


@pytest.fixture
def kernels() -> ctypes.CDLL:
    """The library; without it the test is skipped."""
    found = library()
    if found is None:
        pytest.skip(status())
    return found


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many torch, and so the kernels, may use; as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
