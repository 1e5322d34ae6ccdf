"""The channel syntax of GPT-OSS: a turn is a row of messages to recipients, each with a header."""

from __future__ import annotations

import re
from dataclasses import dataclass

from groupgrad.chat.records import Call, Parameters, Region
from groupgrad.chat.values import call_from_arguments, decode_json

_START = "<|start|>assistant"
_BODY = "<|message|>"
# <|call|> and <|return|> end a turn, <|end|> ends a message within it.
_END = re.compile(r"<\|(?:end|call|return)\|>")
_CALL = re.compile(
    r"\bto=functions\.(?P<name>[^\s<]+)[^<\n]{0,80}(?:<\|(?:channel|constrain)\|>[^<\n]{0,80}){0,4}<\|message\|>"
)
_BOUNDARY = re.compile(r"<\|(?:end|call|return|start|message)\|>")


@dataclass(slots=True)
class ChannelParts:
    """A turn's messages by what they are for."""

    reasoning: str | None
    """Bodies of the analysis channel; None if there are none."""
    rest: str
    """Bodies for the user, and messages to functions with their headers."""


@dataclass(slots=True)
class ChannelSyntax:
    """`to=functions.name` and a channel in a message's header, its arguments as JSON in its body."""

    name: str = "channels with to=functions.name"

    def read(self, text: str, parameters: Parameters) -> list[Region]:
        """The stretches of the text that hold calls, as `Syntax.read` has it."""
        regions: list[Region] = []
        at = 0
        while found := _CALL.search(text, at):
            start = _header_start(text, at, found.start())
            region = self._region(text, start, found)
            regions.append(region)
            at = max(region.end, found.end())
        return regions

    def _region(self, text: str, start: int, found: re.Match[str]) -> Region:
        name = found["name"]
        try:
            decoded = decode_json(text, found.end())
        except ValueError as error:
            close = _END.search(text, found.end())
            call = Call(name, problem=f"the arguments of {name} are no valid JSON: {error}")
            return Region(start, close.start() if close else len(text), [call])
        return Region(start, decoded.end, [call_from_arguments(name, decoded.value)])

    def split(self, text: str) -> ChannelParts:
        """The turn taken apart: reasoning, and what is left to be read for calls."""
        reasoning: list[str] = []
        rest: list[str] = []
        for message in text.split(_START):
            header, body_mark, body = message.partition(_BODY)
            if not body_mark:
                rest.append(message)
            elif "to=functions." in header:
                rest.append(_START + message)
            elif "<|channel|>analysis" in header:
                reasoning.append(_until_end(body))
            else:
                rest.append(_until_end(body))
        return ChannelParts("\n".join(reasoning) if reasoning else None, "".join(rest))


def _until_end(body: str) -> str:
    end = _END.search(body)
    return body[: end.start()] if end else body


def _header_start(text: str, at: int, name: int) -> int:
    """Where the header begins that has a recipient at `name`: behind the last message, its start mark included."""
    start = at
    for mark in _BOUNDARY.finditer(text, at, name):
        is_start = mark[0] == "<|start|>"
        start = mark.start() if is_start else mark.end()
    return start
