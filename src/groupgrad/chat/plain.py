"""Chat format of conversations without tools, for environments that offer none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from groupgrad.chat.parse import make_turn
from groupgrad.chat.records import Turn
from groupgrad.data.completions import CompletionTexts
from groupgrad.data.prompts import PromptMaker


class PlainFormat:
    """Renders prompts and decodes answers; no turn has calls."""

    end_ids: tuple[int, ...] = ()

    def __init__(self, prompt_maker: PromptMaker, eos_ids: Collection[int] = ()):
        self._prompt_maker = prompt_maker
        self._texts = CompletionTexts(prompt_maker.tokenizer, eos_ids, prompt_maker.keeps_special_tokens)

    def prompt_ids(self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, generation prompt included."""
        return self._prompt_maker.token_ids(messages)

    def prompt_text(self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> str:
        """Text of a conversation, generation prompt included."""
        return self._prompt_maker.render(messages)

    def reply_ids(
        self, turn_ids: list[int], replies: list[dict[str, Any]], encode: Callable[[str], list[int]] | None = None
    ) -> list[int]:
        """Never called, as there are no calls to reply to."""
        raise AssertionError("there are no tools, so there are no replies")

    def parse(self, turn_ids: list[int], schemas: list[dict[str, Any]]) -> Turn:
        """Decodes the turn to a message of text."""
        (content,) = self._texts([turn_ids])
        return make_turn(content)
