"""Records of a parsed assistant turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ToolCall:
    """One tool call of an assistant turn."""

    name: str
    """The tool's name; empty if the call gives none."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values by parameter name; empty if the call is malformed."""
    id: str | None = None
    """The id that the model gave the call, in syntaxes that have ids."""
    problem: str | None = None
    """The reason why the call cannot be executed, worded for the model; None for a well-formed call."""


@dataclass(slots=True)
class Turn:
    """A sampled assistant turn as a message, with its tool calls."""

    message: dict[str, Any]
    """`role`, `content` (text), `reasoning_content` if the turn has a reasoning block, and `tool_calls` with the
    well-formed calls, if there are any."""
    calls: list[ToolCall]
    """All calls in the order of the text, malformed ones included."""
    problem: str | None = None
    """The error of the user's response parser that failed on this turn. The content is then the decoded text."""


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
