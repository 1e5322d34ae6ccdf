"""Reasoning blocks of assistant turns."""

from __future__ import annotations

import re
from dataclasses import dataclass

from groupgrad.chat.chat_template import ChatTemplate

_REASONING = "Probe7Thought"
_TAG_BEFORE = re.compile(r"(?:<[^<>\s]+>|\[[A-Z_]+\])\w*\s*\Z")
_TAG_BEHIND = re.compile(r"\s*(?:<[^<>\s]+>|\[/?[A-Z_]+\])")


@dataclass(slots=True)
class ReasoningTags:
    """Tags around the reasoning block at the beginning of a turn."""

    opening: str = "<think>"
    closing: str = "</think>"
    opened_by_prompt: bool = False
    """The generation prompt ends inside a block."""

    def split(self, text: str) -> tuple[str | None, str]:
        """The text of the block, None if there is none, and the text after it.

        Without a closing tag all of the turn is text, as nothing marks the end of the block.
        """
        trimmed = text.lstrip()
        if trimmed.startswith(self.opening):
            body = trimmed[len(self.opening) :]
        elif self.opened_by_prompt:
            body = text
        else:
            return None, text
        reasoning, closing, rest = body.partition(self.closing)
        return (reasoning.strip(), rest.lstrip()) if closing else (None, text)


def find_reasoning_tags(
    template: ChatTemplate, call_message: dict[str, object], generation_prompt: str
) -> ReasoningTags:
    """Finds the tags in a rendered message with reasoning and a call; `<think>` tags if the template renders none."""
    tags = ReasoningTags()
    for name in ("reasoning_content", "reasoning", "thinking"):
        text = template.try_render([{"role": "user", "content": "U"}, {**call_message, name: _REASONING}])
        if text is None or text.count(_REASONING) != 1:
            continue
        start = text.index(_REASONING)
        before, behind = _TAG_BEFORE.search(text[:start]), _TAG_BEHIND.match(text, start + len(_REASONING))
        if before and behind:
            tags = ReasoningTags(before[0].strip(), behind[0].strip())
            break
    tags.opened_by_prompt = generation_prompt.rfind(tags.opening) > generation_prompt.rfind(tags.closing)
    return tags
