"""For tests of arguments that the trainer refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
from datasets import Dataset


def rows(number: int = 4, **columns: Any) -> Dataset:
    """A data set of short prompts with further columns, the same in each row."""
    return Dataset.from_list([{"prompt": f"{a}+1=", **columns} for a in range(number)])


def assert_refused(error: pytest.ExceptionInfo[Any], seen: str, remedy: str) -> None:
    """The message shows the value seen and names the remedy; both are regular expressions."""
    text = " ".join(str(error.value).split())
    assert re.search(seen, text), text
    assert re.search(remedy, text), text
