"""Extracts plain text from prompts and completions that may be message lists."""

from __future__ import annotations

from typing import Any


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """Returns a text completion as it is, and of messages the text of the assistant's last one.

    With tools, the first assistant message is a call and the last one is the answer. Without an assistant message, or
    without content in the last one, the text is empty.
    """
    return completion if isinstance(completion, str) else content_text(_last_answer(completion).get("content"))


def turn_text(completion: str | list[dict[str, Any]]) -> str:
    """`completion_text` behind the reasoning that was split from the assistant's last message, in `<think>` tags."""
    text = completion_text(completion)
    reasoning = None if isinstance(completion, str) else _last_answer(completion).get("reasoning_content")
    return text if reasoning is None else f"<think>{reasoning}</think>{text}"


def _last_answer(completion: list[dict[str, Any]]) -> dict[str, Any]:
    return next((message for message in reversed(completion) if message.get("role", "assistant") == "assistant"), {})


def content_text(content: Any) -> str:
    """Joins the texts of a message's content: a string, a list of parts (`{"type": "text", "text": ...}`) or None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def conversation_text(value: Any) -> str:
    """Formats a prompt or completion as one line for an error message: `role: content | role: content`."""
    if isinstance(value, str):
        return value
    return " | ".join(f"{message.get('role', '?')}: {content_text(message.get('content'))}" for message in value)
