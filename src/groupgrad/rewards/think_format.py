"""Reward for the `<think>` format of a completion."""

from __future__ import annotations

from typing import Any

from groupgrad.rewards.text import completion_text


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
    """1.0 for a completion that starts with its only `<think>` and has a `</think>`, else 0.0.

    `completions` are texts or message lists, of which the assistant's last message counts. Nothing, not even a space,
    may come before `<think>`; any text may follow `</think>`.
    """
    texts = [completion_text(completion) for completion in completions]
    return [float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text) for text in texts]
