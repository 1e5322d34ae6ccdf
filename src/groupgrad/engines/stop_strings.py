"""Stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Tells whether the newest token of a completion completes one of some strings."""

    def __init__(self, strings: Sequence[str], tokenizer: Any):
        self._strings, self._tokenizer = tuple(strings), tokenizer
        # A token gives at least one byte, but for a few special ones.
        self._window = max((len(string.encode()) for string in self._strings), default=0) + 8

    def __bool__(self) -> bool:
        return bool(self._strings)

    def is_end(self, ids: list[int]) -> bool:
        """True if one of the strings occurs in the completion `ids`, looking no further back than its newest token
        can matter."""
        if not self._strings:
            return False
        text = self._tokenizer.decode(ids[-self._window :])
        return any(string in text for string in self._strings)
