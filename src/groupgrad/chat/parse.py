"""Construction of parsed turns, and validation of messages from response parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupgrad.chat.records import ToolCall, Turn
from groupgrad.chat.values import call_from_value

ResponseParser = Callable[[str, list[int]], Mapping[str, Any]]
"""Maps a turn's text (special tokens included, end tokens removed) and its ids to an assistant message."""


def make_turn(
    content: str, reasoning: str | None = None, calls: Sequence[ToolCall] = (), problem: str | None = None
) -> Turn:
    """Builds a turn with its message in the form of chat templates, from which malformed calls are left out."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    entries = []
    for call in calls:
        if call.problem is None:
            call_id = {} if call.id is None else {"id": call.id}
            function = {"name": call.name, "arguments": call.arguments}
            entries.append({"type": "function", **call_id, "function": function})
    if entries:
        message["tool_calls"] = entries
    return Turn(message, list(calls), problem)


def checked_turn(message: Any) -> Turn:
    """Converts a response parser's message to a turn; TypeError or ValueError if it is no message."""
    if not isinstance(message, Mapping):
        raise TypeError(f"it returned a {type(message).__name__}; it must return a message as a dict")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise TypeError(f"its content is a {type(content).__name__}; it must be a text")
    entries = message.get("tool_calls") or []
    if not isinstance(entries, (list, tuple)):
        raise TypeError(f"its tool_calls are a {type(entries).__name__}; they must be a list")
    calls = [call_from_value(entry) for entry in entries]
    reasoning = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)), None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise TypeError(f"its reasoning is a {type(reasoning).__name__}; it must be a text")
    return make_turn(content or "", reasoning, calls)
