"""The compiled kernels, and how many threads they use."""

from __future__ import annotations

import ctypes

import pytest
from thread_counts import threads

from groupgrad.kernels import library, status

__all__ = ["kernels", "threads"]


@pytest.fixture
def kernels() -> ctypes.CDLL:
    """The library; without it the test is skipped."""
    found = library()
    if found is None:
        pytest.skip(status())
    return found
