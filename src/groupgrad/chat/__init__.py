"""Chat templates with tools: prompts, parsing of assistant turns, and tool replies."""

from groupgrad.chat.chat_format import ChatFormat, PlainFormat
from groupgrad.chat.values import ToolCall, Turn

__all__ = ["ChatFormat", "PlainFormat", "ToolCall", "Turn"]
