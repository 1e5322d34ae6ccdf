"""Rewards for the form of a completion."""

from __future__ import annotations

from typing import Any

from groupgrad.rewards.text import completion_text


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
    """1.0 for each completion that opens with `<think>` (the only one in it) and closes it, else 0.0.

    `completions` are texts or message lists, of which the assistant's last message counts. Nothing, not even a space,
    may come before `<think>`; what comes after `</think>` is free.
    """
    return [1.0 if _is_think_format(completion_text(completion)) else 0.0 for completion in completions]


def _is_think_format(text: str) -> bool:
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text
