"""Chat templates with tools: prompts, parsing of assistant turns, and tool replies."""

from groupgrad.chat.format import ChatFormat
from groupgrad.chat.plain import PlainFormat
from groupgrad.chat.records import Call, Turn

__all__ = ["Call", "ChatFormat", "PlainFormat", "Turn"]
