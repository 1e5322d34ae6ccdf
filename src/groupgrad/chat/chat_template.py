"""Rendering of conversations with a tokenizer's chat template, and the control tokens of rendered texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupgrad.data.outside_text import OutsideText
from groupgrad.data.prompts import drop_empty_fields
from groupgrad.types import Messages


@dataclass(slots=True, frozen=True)
class ControlToken:
    """A special or added token of the tokenizer at its place in a rendered text."""

    text: str
    id: int
    end: int


class ChatTemplate:
    """Renders conversations with the chat template of a tokenizer.

    `prepare_messages` brings messages into the form that the template takes (text or content blocks).
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        prepare_messages: Callable[[Messages], Messages] | None = None,
    ):
        self.tokenizer = tokenizer
        self._prepare_messages = prepare_messages or drop_empty_fields
        self._kwargs = dict(chat_template_kwargs or {})
        self._outside_text = OutsideText(tokenizer, self._kwargs)
        self.error: Exception | None = None
        """The exception of the last `try_render` that returned None."""
        self._ids = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
        self._ids |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")

    def render(
        self,
        messages: list[dict[str, Any]],
        schemas: list[dict[str, Any]] | None = None,
        *,
        prompt: bool = False,
        ending: dict[str, bool] | None = None,
    ) -> str:
        """Text of a conversation; `prompt` adds the generation prompt, or `ending` has the options of its end.

        Raises whatever the template raises.
        """
        render = partial(
            self.tokenizer.apply_chat_template,
            tools=schemas or None,
            tokenize=False,
            **(ending or {"add_generation_prompt": prompt}),
            **self._kwargs,
        )
        prepared = self._prepare_messages(messages)
        if self._prepare_messages is drop_empty_fields:  # nothing is marked
            return render(prepared)
        return self._outside_text.render(render, prepared)

    def try_render(self, *args: Any, **kwargs: Any) -> str | None:
        """`render`, or None if the template rejects the conversation (the exception is kept in `error`)."""
        try:
            return self.render(*args, **kwargs)
        except Exception as error:  # templates may raise anything
            self.error = error
            return None

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text. Control tokens in it are encoded as such, whatever part they came with."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def control_tokens(self, text: str, start: int = 0, end: int | None = None) -> list[ControlToken]:
        """Control tokens in `text[start:end]`, in order."""
        matches = self._pattern.finditer(text, start, len(text) if end is None else end)
        return [ControlToken(match[0], self._ids[match[0]], match.end()) for match in matches]


def common_prefix(first: str, second: str) -> str:
    """The longest text that both texts begin with."""
    length = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
    return first[:length]
