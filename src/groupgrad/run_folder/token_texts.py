"""The text of each token of a rollout."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


class TokenTexts:
    """Finds the texts of single tokens, as they stand within a text. For one thread.

    It uses a copy of the tokenizer, made at the first call: the training thread may change the original's settings.
    """

    def __init__(self, tokenizer: Any):
        self._original, self._copy = tokenizer, None
        self._has_failed = False
        self._texts: dict[int, str] = {}
        self._anchor: tuple[list[int], str] | None = None
        """Ids before a token, and their text: some tokenizers drop a leading blank from the first token."""

    def __call__(self, ids: np.ndarray) -> list[str]:
        """The text of each of (L,) tokens; their numbers if the tokenizer fails, which is said once."""
        try:
            return self._find(ids)
        except Exception as error:  # the tokenizer may be of any origin
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "the texts of tokens are not stored, their numbers are: the tokenizer's copy failed (%s: %s)",
                    type(error).__name__,
                    error,
                )
            return [f"<{number}>" for number in ids.tolist()]

    def _find(self, ids: np.ndarray) -> list[str]:
        """The text of each of (L,) tokens. A character that several tokens make is the text of the first of them."""
        for number in np.unique(ids).tolist():
            if number not in self._texts:
                self._texts[number] = self._text(number)
        numbers = ids.tolist()
        texts = [self._texts[number] for number in numbers]
        place = 0
        while place < len(texts):
            if "�" not in texts[place]:
                place += 1
                continue
            end = place + 1
            while end < len(texts) and end - place < 16 and "�" in texts[end]:
                end += 1
            joined = self._decode(numbers[place:end])
            if end - place > 1 and "�" not in joined:
                texts[place:end] = [joined, *[""] * (end - place - 1)]
            place = end
        return texts

    @property
    def _tokenizer(self) -> Any:
        if self._copy is None:
            self._copy = copy.deepcopy(self._original)
        return self._copy

    def _text(self, number: int) -> str:
        if self._anchor is None:
            ids = self._tokenizer.encode("a", add_special_tokens=False)
            self._anchor = (ids, self._decode(ids))
        ids, before = self._anchor
        text = self._decode([*ids, number])
        return text[len(before) :] if text.startswith(before) else self._decode([number])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
