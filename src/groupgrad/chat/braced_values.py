"""Decoder for `{key:value}` arguments with bare keys, as the Gemma family writes them."""

from __future__ import annotations

import json
import re
from typing import Any

from groupgrad.chat.values import Decoded

_CONSTANTS = {"None": None, "True": True, "False": False}
_BARE_END = re.compile(r"[,}\]]")
_COLON = re.compile(":")


def decode_braced(text: str, at: int, *, quote: str) -> Decoded:
    """Decodes the object, list or value that begins at `at`; ValueError if it is malformed.

    Texts stand between `quote` marks; without them a value is a JSON literal, a Python constant, or itself a text.
    """
    decoder = _Decoder(text, at, quote)
    try:
        value = decoder.value()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return Decoded(value, decoder.at)


class _Decoder:
    """Recursive descent over `text`; `at` is the next character to read."""

    def __init__(self, text: str, at: int, quote: str):
        self.text, self.at, self.quote = text, at, quote

    def value(self) -> Any:
        if (quoted := self._quoted()) is not None:
            return quoted
        if self._take("{"):
            values: dict[str, Any] = {}
            while not self._take_end("}"):
                key = self._key()
                values[key] = self.value()
            return values
        if self._take("["):
            items: list[Any] = []
            while not self._take_end("]"):
                items.append(self.value())
            return items
        bare = self._until(_BARE_END)
        try:
            return json.loads(bare)
        except ValueError:
            return _CONSTANTS.get(bare, bare)

    def _key(self) -> str:
        key = self._quoted()
        if key is None:
            key = self._until(_COLON).strip('"')
        if not self._take(":"):
            raise ValueError(f"a colon is missing behind the key {key!r}")
        return key

    def _quoted(self) -> str | None:
        if not self.quote or not self._take(self.quote):
            return None
        start = self.at
        end = self.text.find(self.quote, start)
        if end < 0:
            raise ValueError("a text is not closed")
        self.at = end + len(self.quote)
        return self.text[start:end]

    def _until(self, end: re.Pattern[str]) -> str:
        match = end.search(self.text, self.at)
        if match is None:
            raise ValueError("it ends too early")
        bare = self.text[self.at : match.start()].strip()
        self.at = match.start()
        return bare

    def _take_end(self, bracket: str) -> bool:
        """Takes a comma if there is one, and the closing bracket if it stands there."""
        self._take(",")
        if self._take(bracket):
            return True
        if self.at >= len(self.text):
            raise ValueError("it ends too early")
        if self.text[self.at] in "}]":
            raise ValueError(f"{self.text[self.at]} where {bracket} or a value should stand")
        return False

    def _take(self, literal: str) -> bool:
        """Skips white space, and the literal if it stands there."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        is_there = self.text.startswith(literal, self.at)
        self.at += len(literal) * is_there
        return is_there
