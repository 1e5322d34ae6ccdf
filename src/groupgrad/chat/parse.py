"""Messages from others' parsers, checked: a user's hook and the response template that a tokenizer may bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from groupgrad.chat.records import Call, Turn
from groupgrad.chat.values import call_from_value

ResponseParser = Callable[[str, list[int]], Mapping[str, Any]]
"""From a turn's text (special tokens in it, end marks off) and ids to an assistant message."""


def turn_message(content: str, reasoning: str | None, calls: list[Call]) -> dict[str, Any]:
    """An assistant message as chat templates take it; only well-formed calls are in it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    entries = []
    for call in calls:
        if call.problem is None:
            entry: dict[str, Any] = {"type": "function"}
            if call.id is not None:
                entry["id"] = call.id
            entries.append({**entry, "function": {"name": call.name, "arguments": call.arguments}})
    if entries:
        message["tool_calls"] = entries
    return message


def hooked_turn(parser: ResponseParser, text: str, ids: list[int], plain: str) -> Turn:
    """What a user's parser makes of a turn; a turn of the plain text with a problem if it fails."""
    try:
        return checked_turn(parser(text, list(ids)))
    except Exception as error:  # a user's function may raise what it likes; a bad rollout is data
        problem = f"response_parser failed: {type(error).__name__}: {error}"
        return Turn(turn_message(plain, None, []), [], problem)


def checked_turn(message: Any) -> Turn:
    """The turn that a parsed message stands for; TypeError or ValueError for what is no message."""
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
    return Turn(turn_message(content or "", reasoning, calls), calls)
