"""Reasoning blocks of assistant turns."""

from __future__ import annotations

import re
from dataclasses import dataclass

from groupgrad.chat.channel_syntax import ChannelSyntax
from groupgrad.chat.render import Template

_THOUGHT = "Probe7Thought"
_BEFORE = re.compile(r"(?:<[^<>\s]+>|\[[A-Z_]+\])\w*\s*\Z")
_BEHIND = re.compile(r"\s*(?:<[^<>\s]+>|\[/?[A-Z_]+\])")


@dataclass(slots=True)
class Parts:
    """A turn's text without its reasoning."""

    reasoning: str | None
    """What stood in the block; None if there is no block."""
    rest: str


@dataclass(slots=True)
class TaggedReasoning:
    """A block between two tags at the beginning of a turn."""

    opening: str = "<think>"
    closing: str = "</think>"
    opened_by_prompt: bool = False
    """The generation prompt ends inside a block."""

    def split(self, text: str) -> Parts:
        """The block, and the text behind it. A block that is not closed is none: nothing says where it ends."""
        trimmed = text.lstrip()
        if trimmed.startswith(self.opening):
            body = trimmed[len(self.opening) :]
        elif self.opened_by_prompt:
            body = text
        else:
            return Parts(None, text)
        reasoning, closing, rest = body.partition(self.closing)
        return Parts(reasoning.strip(), rest.lstrip()) if closing else Parts(None, text)


class ChannelReasoning:
    """The analysis channel of the channel syntax."""

    def __init__(self, syntax: ChannelSyntax):
        self._syntax = syntax

    def split(self, text: str) -> Parts:
        """The analysis, and the messages for the user and for functions."""
        parts = self._syntax.split(text)
        return Parts(parts.reasoning, parts.rest)


def find_reasoning(template: Template, call_message: dict[str, object], generation_prompt: str) -> TaggedReasoning:
    """How the template writes reasoning, as far as it shows it; `<think>` tags if it does not."""
    found = TaggedReasoning()
    for name in ("reasoning_content", "reasoning", "thinking"):
        text = template.attempt([{"role": "user", "content": "U"}, {**call_message, name: _THOUGHT}])
        if text is None or text.count(_THOUGHT) != 1:
            continue
        place = text.index(_THOUGHT)
        before, behind = _BEFORE.search(text[:place]), _BEHIND.match(text, place + len(_THOUGHT))
        if before and behind:
            found = TaggedReasoning(before[0].strip(), behind[0].strip())
            break
    found.opened_by_prompt = generation_prompt.rfind(found.opening) > generation_prompt.rfind(found.closing)
    return found
