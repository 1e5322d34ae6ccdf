"""Channel syntax of GPT-OSS: a turn is a sequence of messages, each with a header and a body.

A message with `to=functions.name` in its header calls a function with its body as JSON arguments; a message in the
analysis channel is reasoning.
"""

from __future__ import annotations

import re

from groupgrad.chat.records import CallSpan, Parameters, ToolCall
from groupgrad.chat.values import call_from_arguments, decode_json

_START = "<|start|>assistant"
_BODY = "<|message|>"
# <|call|> and <|return|> end a turn, <|end|> ends a message within it.
_END = re.compile(r"<\|(?:end|call|return)\|>")
_CALL = re.compile(
    r"\bto=functions\.(?P<name>[^\s<]+)[^<\n]{0,80}(?:<\|(?:channel|constrain)\|>[^<\n]{0,80}){0,4}<\|message\|>"
)
_BOUNDARY = re.compile(r"(?P<start><\|start\|>)|<\|(?:end|call|return|message)\|>")


class ChannelSyntax:
    """Parses calls and reasoning of a turn in channels."""

    name: str = "channels with to=functions.name"

    def read(self, text: str, parameters: Parameters) -> list[CallSpan]:
        """Parses all calls of a text, in order. Never raises: a malformed call is a call with a `problem`."""
        spans: list[CallSpan] = []
        at = 0
        while header := _CALL.search(text, at):
            start, name = at, header["name"]
            for boundary in _BOUNDARY.finditer(text, at, header.start()):
                start = boundary.start() if boundary["start"] else boundary.end()
            try:
                arguments, at = decode_json(text, header.end())
                call = call_from_arguments(name, arguments)
            except ValueError as error:
                call = ToolCall(name, problem=f"the arguments of {name} are no valid JSON: {error}")
                end = _END.search(text, header.end())
                at = end.start() if end else len(text)
            spans.append(CallSpan(start, at, [call]))
        return spans

    def split(self, text: str) -> tuple[str | None, str]:
        """Separates the bodies of the analysis channel from bodies for the user and whole messages to functions."""
        reasoning: list[str] = []
        rest: list[str] = []
        for message in text.split(_START):
            header, marker, body = message.partition(_BODY)
            if not marker:
                rest.append(message)
            elif "to=functions." in header:
                rest.append(_START + message)
            else:
                is_reasoning = "<|channel|>analysis" in header
                (reasoning if is_reasoning else rest).append(_END.split(body, maxsplit=1)[0])
        return "\n".join(reasoning) if reasoning else None, "".join(rest)
