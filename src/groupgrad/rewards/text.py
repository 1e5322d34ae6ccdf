"""The text that a reward function judges in a completion."""

from __future__ import annotations

from typing import Any


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The completion itself if it is a text, otherwise the text of the assistant's last message.

    The last message rather than the first: with tools the first one is a call, the last one the answer. Content made of
    parts gives its text parts end to end. A conversation without an assistant message, or whose last one has no
    content, gives "".
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return content_text(message.get("content"))
    return ""


def content_text(content: Any) -> str:
    """The text in a message's content: a string, a list of parts (`{"type": "text", "text": ...}`) or None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def conversation_text(value: Any) -> str:
    """A prompt or completion as one line of text for a message to a person: `role: content | role: content`."""
    if isinstance(value, str):
        return value
    return " | ".join(f"{message.get('role', '?')}: {content_text(message.get('content'))}" for message in value)
