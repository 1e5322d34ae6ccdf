"""The examples as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def from_examples() -> Iterator[Callable[[str], ModuleType]]:
    """`from_examples(name)`: that file of the folder `examples`, in which modules are looked for while tests run."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(EXAMPLES))
