"""What is read from a sampled turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class Call:
    """One tool call of an assistant turn, in the order in which the model wrote it."""

    name: str
    """The tool's name; empty if the call gives none."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """By parameter name; empty if they could not be read."""
    id: str | None = None
    """The id that the model gave the call, in syntaxes that have ids."""
    problem: str | None = None
    """Why the call cannot be executed, in words for the model; None for a well-formed call."""


@dataclass(slots=True)
class Turn:
    """A sampled assistant turn as a message, with its calls."""

    message: dict[str, Any]
    """`role`, `content` (text), `reasoning_content` if a reasoning block was found, and `tool_calls` with the
    well-formed calls, if there are any."""
    calls: list[Call]
    """All calls, broken ones too, in order."""
    problem: str | None = None
    """Why a parser given by the user or the tokenizer could not read this turn; its content is then the plain text."""


@dataclass(slots=True)
class Region:
    """A stretch of a turn's text that holds calls: `text[start:end]`, tags included."""

    start: int
    end: int
    calls: list[Call]

    @property
    def is_well_formed(self) -> bool:
        """True if every call in it can be executed as far as its syntax goes."""
        return all(call.problem is None for call in self.calls)


Parameters = dict[str, dict[str, Any]]
"""Parameter schemas by function name and parameter name."""


class Syntax(Protocol):
    """A way of writing calls."""

    @property
    def name(self) -> str:
        """What the syntax is, for people."""
        ...

    def read(self, text: str, parameters: Parameters) -> list[Region]:
        """The stretches of the text that hold calls, in order. Broken calls are calls with a problem; never raises."""
        ...
