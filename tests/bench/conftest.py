"""Makes the scripts in bench/ importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="package")
def bench_on_path() -> Iterator[None]:
    """bench/ is a folder of scripts; they import each other by name."""
    folder = str(Path(__file__).parents[2] / "bench")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)
