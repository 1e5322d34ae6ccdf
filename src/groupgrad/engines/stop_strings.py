"""Finds stop strings in the completions of both in-process engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Strings that end a completion. Strings in the prompt, or across its end, do not count."""

    def __init__(self, strings: str | Sequence[str], tokenizer: Any):
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        self._tokenizer = tokenizer
        # A token decodes to at least one byte, except a few special ones.
        self.window = max((len(string.encode(errors="replace")) for string in self._strings), default=0) + 8
        """Last tokens of a completion that the newest token may complete a string with."""

    def with_more(self, strings: Sequence[str]) -> StopStrings:
        """These strings and others."""
        return StopStrings((*self._strings, *strings), self._tokenizer)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def is_end(self, ids: list[int]) -> bool:
        """True if the newest token of the completion `ids` may complete one of the strings: only the last tokens are
        decoded."""
        if not self._strings:
            return False
        text = self._tokenizer.decode(ids[-self.window :])
        return any(string in text for string in self._strings)

    def end(self, ids: list[int], known: int = 0) -> int | None:
        """Number of tokens up to the one that completes a string first; None if no string occurs. The first `known`
        tokens complete none."""
        if not self._strings:
            return None
        return next((n for n in range(known + 1, len(ids) + 1) if self.is_end(ids[max(0, n - self.window) : n])), None)
