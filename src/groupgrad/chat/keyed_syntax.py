"""Calls whose arguments are written one by one, each with its key: XML-like parameter tags, key and value pairs."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

from groupgrad.chat.literals import loose, opened_regions, tight, widened
from groupgrad.chat.records import Call, Parameters, Region
from groupgrad.chat.values import typed_value

_NAME = r"(?P<name>[^\s<>\"']+)"


@dataclass(slots=True)
class KeyedValues:
    """`opening` name `name_end` (`key_opening` key `key_end` value `value_end`)* `closing`.

    Values are texts; the tool's schema gives them their type.
    """

    opening: str
    name_end: str
    key_opening: str
    key_end: str
    value_end: str
    closing: str
    outer_opening: str = ""
    outer_closing: str = ""
    _open: re.Pattern[str] = field(init=False)
    _head: re.Pattern[str] = field(init=False)
    _key: re.Pattern[str] = field(init=False)
    _value: re.Pattern[str] = field(init=False)
    _close: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._open = re.compile(tight(self.opening))
        self._head = re.compile(tight(self.opening) + r"\s*" + _NAME + loose(self.name_end))
        self._key = re.compile(
            r"\s*" + tight(self.key_opening) + r"\s*(?P<key>[^\n<>]+?)" + _before_value(self.key_end)
        )
        follow = rf"(?=\s*(?:{tight(self.key_opening)}|{tight(self.closing)}|\Z))"
        self._value = re.compile(r"(?P<value>.*?)" + _behind_value(self.value_end) + follow, re.DOTALL)
        self._close = re.compile(r"\s*" + tight(self.closing))

    @property
    def name(self) -> str:
        """What the syntax is, for people."""
        return f"keys and values ({self.key_opening.strip()}...) after {''.join(self.opening.split())}"

    def read(self, text: str, parameters: Parameters) -> list[Region]:
        """The stretches of the text that hold calls, as `Syntax.read` has it."""
        read = functools.partial(self._region, parameters=parameters)
        regions = opened_regions(text, self._open, read)
        return widened(text, regions, self.outer_opening, self.outer_closing)

    def _region(self, text: str, start: int, at: int, parameters: Parameters) -> Region:
        next_open = self._open.search(text, at)
        limit = next_open.start() if next_open else len(text)
        head = self._head.match(text, start, limit)
        if head is None:
            close = self._close.search(text, at, limit)
            problem = f"the call has no name behind {self.opening.strip()}"
            return Region(start, close.end() if close else limit, [Call("", problem=problem)])
        call = Call(head["name"])
        schemas = parameters.get(call.name, {})
        at = head.end()
        while key := self._key.match(text, at):
            value = self._value.match(text, key.end(), limit)
            if value is None:
                call.problem = f"the argument {key['key']!r} of {call.name} is not closed by {self.value_end.strip()}"
                call.arguments = {}
                close = self._close.search(text, at, limit)
                return Region(start, close.end() if close else limit, [call])
            call.arguments[key["key"]] = _typed(value["value"], schemas.get(key["key"]))
            at = value.end()
        close = self._close.match(text, at)
        if close is None:
            call.arguments = {}
            call.problem = f"the call of {call.name} is not closed: {self.closing.strip()} is missing behind it"
            close = self._close.search(text, at, max(limit, at))
            return Region(start, close.end() if close else max(limit, at), [call])
        return Region(start, close.end(), [call])


def _typed(value: str, schema: Any) -> Any:
    return typed_value(value, schema if isinstance(schema, dict) else None)


def _before_value(literal: str) -> str:
    # White space that the template puts next to a value is matched once and exactly: more of it is the value's own.
    core = literal.rstrip()
    gap = literal[len(core) :]
    return r"\s*" + tight(core) + (f"(?:{re.escape(gap)})?" if gap else "")


def _behind_value(literal: str) -> str:
    core = literal.strip()
    gap = literal[: len(literal) - len(literal.lstrip())]
    return (f"(?:{re.escape(gap)})?" if gap else "") + tight(core)
