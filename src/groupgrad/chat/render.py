"""A tokenizer's chat template as a function from conversations to texts and token ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groupgrad.data.prompts import drop_empty_fields
from groupgrad.types import Messages


@dataclass(slots=True, frozen=True)
class Mark:
    """A token of the tokenizer's own in a rendered text."""

    text: str
    id: int
    start: int
    end: int


class Template:
    """Renders conversations as the tokenizer's chat template does."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        readable: Callable[[Messages], Messages] | None = None,
    ):
        self.tokenizer = tokenizer
        self._readable = readable or drop_empty_fields
        self.kwargs = dict(chat_template_kwargs or {})
        self.failure: Exception | None = None
        """What the last `attempt` that gave None failed with."""
        added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
        added |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))
        self.added_ids: dict[str, int] = added
        """Ids of the tokens that are never made of other text, by their text."""
        ordered = sorted(added, key=len, reverse=True)
        self._marks = re.compile("|".join(re.escape(text) for text in ordered) if ordered else r"(?!)")

    def text(
        self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]] | None = None, *, prompt: bool = False
    ) -> str:
        """The conversation as text; `prompt` adds the generation prompt. Raises whatever the template raises."""
        return self.tokenizer.apply_chat_template(
            self._readable(messages),
            tools=schemas or None,
            tokenize=False,
            add_generation_prompt=prompt,
            **self.kwargs,
        )

    def attempt(
        self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]] | None = None, *, prompt: bool = False
    ) -> str | None:
        """As `text`, or None if the template refuses the conversation (`failure` says how)."""
        try:
            return self.text(messages, schemas, prompt=prompt)
        except Exception as error:  # templates raise what they like
            self.failure = error
            return None

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered text."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def first_mark(self, text: str, start: int, end: int | None = None) -> Mark | None:
        """The first token of the tokenizer's own in a stretch of a text."""
        found = self._marks.search(text, start, len(text) if end is None else end)
        return None if found is None else Mark(found[0], self.added_ids[found[0]], found.start(), found.end())

    def last_mark(self, text: str, start: int) -> Mark | None:
        """The last token of the tokenizer's own behind a place of a text."""
        return next(reversed(self.marks(text, start)), None)

    def marks(self, text: str, start: int = 0) -> list[Mark]:
        """The tokens of the tokenizer's own behind a place of a text, in order."""
        found = self._marks.finditer(text, start)
        return [Mark(mark[0], self.added_ids[mark[0]], mark.start(), mark.end()) for mark in found]


def shared_length(first: str, second: str) -> int:
    """How many characters both texts begin with."""
    limit = min(len(first), len(second))
    return next((i for i in range(limit) if first[i] != second[i]), limit)


def difference(first: str, second: str, width: int = 60) -> tuple[str, str]:
    """Both texts around the first place where they differ."""
    place = shared_length(first, second)
    start = max(0, place - width)
    return (
        "..." * (start > 0) + first[start : place + width] + "..." * (place + width < len(first)),
        "..." * (start > 0) + second[start : place + width] + "..." * (place + width < len(second)),
    )
