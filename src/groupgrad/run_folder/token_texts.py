"""The text of each token of a rollout, and who wrote it: the policy, a tool or the chat template."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from groupgrad.types import Messages, Rollout

logger = logging.getLogger(__name__)

Writer = Literal["policy", "tool", "template"]


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


def token_writers(rollout: Rollout, texts: Sequence[str]) -> list[Writer] | None:
    """The writer of each completion token, from `texts`, the text of each; None if the policy wrote all.

    Between two turns of the policy a tool wrote the tokens that hold characters of its reply, and the template the
    others. Where the template has changed a reply, so that it does not stand there literally, and in the tokens that a
    `rollout_func` has put in, all of them count as the tool's.
    """
    if rollout.sampled is None or all(rollout.sampled):
        return None
    replies = _replies(rollout.completion if isinstance(rollout.completion, list) else [])
    writers: list[Writer] = []
    for is_policy, places in groupby(range(len(texts)), key=rollout.sampled.__getitem__):
        stretch = [texts[place] for place in places]
        policy: list[Writer] = ["policy"] * len(stretch)
        writers += policy if is_policy else _between_turns(stretch, next(replies, []))
    return writers


def _replies(messages: Messages) -> Iterator[list[str]]:
    """The texts of the messages between two of the policy, for each time that there are some."""
    for is_policy, some in groupby(messages, key=lambda message: message.get("role") == "assistant"):
        if not is_policy:
            yield [text for message in some for text in _texts(message.get("content"))]


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    blocks = content if isinstance(content, (list, tuple)) else []
    return [str(block["text"]) for block in blocks if isinstance(block, Mapping) and "text" in block]


def _between_turns(stretch: Sequence[str], replies: Sequence[str]) -> list[Writer]:
    if not replies:
        return ["tool"] * len(stretch)
    text, end, found = "".join(stretch), 0, []
    for reply in filter(None, (reply.strip() for reply in replies)):
        start = text.find(reply, end)
        if start < 0:
            return ["tool"] * len(stretch)
        end = start + len(reply)
        found.append((start, end))
    starts = accumulate((len(token) for token in stretch), initial=0)
    return [
        "tool" if any(begin < start + len(token) and start < end for begin, end in found) else "template"
        for token, start in zip(stretch, starts)
    ]
