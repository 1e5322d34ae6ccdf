"""Calls whose arguments are a JSON object: whole calls as objects, or a name in front of its arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from groupgrad.chat.literals import loose, opened_regions, tight, widened
from groupgrad.chat.records import Call, Parameters, Region
from groupgrad.chat.values import call_from_arguments, call_from_value, decode_json

_SEPARATOR = re.compile(r"[\s,;]*")


@dataclass(slots=True)
class JsonObjects:
    """Objects with a name and arguments between tags, or one list of them behind a tag."""

    opening: str
    closing: str
    """Empty if nothing but the end of the JSON text ends a call."""
    outer_opening: str = ""
    outer_closing: str = ""
    in_list: bool = False
    _open: re.Pattern[str] = field(init=False)
    _close: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._open = re.compile(tight(self.opening) + r"\s*")
        self._close = re.compile(r"\s*" + tight(self.closing))

    @property
    def name(self) -> str:
        """What the syntax is, for people."""
        what = "a JSON list of calls" if self.in_list else "JSON objects"
        return f"{what} in {self.opening} tags" if self.closing else f"{what} after {self.opening}"

    def read(self, text: str, parameters: Parameters) -> list[Region]:
        """The stretches of the text that hold calls, as `Syntax.read` has it."""
        regions = opened_regions(text, self._open, self._region)
        return widened(text, regions, self.outer_opening, self.outer_closing)

    def _region(self, text: str, start: int, at: int) -> Region:
        calls: list[Call] = []
        while True:
            try:
                decoded = decode_json(text, at)
            except ValueError as error:
                calls.append(Call("", problem=f"the call is no valid JSON: {error}"))
                return Region(start, self._end_of_broken(text, at), calls)
            values = decoded.value if isinstance(decoded.value, list) else [decoded.value]
            calls += [call_from_value(value) for value in values]
            after = _SEPARATOR.match(text, decoded.end)
            assert after is not None
            if not text.startswith("{", after.end()):
                break
            at = after.end()
        if not self.closing:
            return Region(start, decoded.end, calls)
        close = self._close.match(text, decoded.end)
        if close is None:
            for call in calls:
                call.arguments = {}
                call.problem = call.problem or f"the call is not closed: {self.closing} is missing behind it"
            return Region(start, self._end_of_broken(text, decoded.end), calls)
        return Region(start, close.end(), calls)

    def _end_of_broken(self, text: str, at: int) -> int:
        next_open = self._open.search(text, at)
        limit = next_open.start() if next_open else len(text)
        close = self._close.search(text, at, limit) if self.closing else None
        return close.end() if close else limit


@dataclass(slots=True)
class BareJson:
    """Objects with a name and parameters that are the whole turn, as Llama 3 writes them; others follow after `;`."""

    name: str = "bare JSON objects"
    _start: re.Pattern[str] = field(default_factory=lambda: re.compile(r"\s*"))
    _tag: re.Pattern[str] = field(default_factory=lambda: re.compile(re.escape("<|python_tag|>") + r"\s*"))

    def read(self, text: str, parameters: Parameters) -> list[Region]:
        """The stretches of the text that hold calls, as `Syntax.read` has it."""
        tag = self._tag.search(text)
        found = tag or self._start.match(text)
        assert found is not None
        at = found.end()
        if not text.startswith(("{", "["), at):
            return []
        calls: list[Call] = []
        end = at
        while text.startswith(("{", "["), at):
            try:
                decoded = decode_json(text, at)
            except ValueError as error:
                if calls or re.match(r"\[?\s*\{\s*\"(name|type|function)\"", text[at:]):
                    calls.append(Call("", problem=f"the call is no valid JSON: {error}"))
                    end = len(text)
                break
            values = decoded.value if isinstance(decoded.value, list) else [decoded.value]
            if not values or not all(_looks_like_call(value) for value in values):
                break
            calls += [call_from_value(value) for value in values]
            end = decoded.end
            after = _SEPARATOR.match(text, end)
            assert after is not None
            at = after.end()
        return [Region(found.start(), end, calls)] if calls else []


def _looks_like_call(value: object) -> bool:
    # A turn may well answer with a JSON object; only one with both parts of a call is taken for one.
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("function"), dict):
        return True
    named = isinstance(value.get("name"), str) or isinstance(value.get("function"), str)
    return named and ("parameters" in value or "arguments" in value)


@dataclass(slots=True)
class NamedJson:
    """A name, then a JSON object with its arguments, with fixed texts before, between and behind."""

    opening: str
    middle: str
    closing: str
    outer_opening: str = ""
    outer_closing: str = ""
    id_mark: str = ""
    """What stood in `middle` for the call's id, if it has one."""
    _open: re.Pattern[str] = field(init=False)
    _head: re.Pattern[str] = field(init=False)
    _close: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._open = re.compile(tight(self.opening))
        if self.id_mark:
            before, behind = self.middle.split(self.id_mark, 1)
            middle = loose(before) + r"(?P<id>[\w.:-]+)" + loose(behind)
        else:
            middle = loose(self.middle)
        self._head = re.compile(tight(self.opening) + r"\s*(?P<name>[^\s<>{}\[\]\"']+?)" + middle + r"(?=\{)")
        self._close = re.compile(r"\s*" + tight(self.closing))

    @property
    def name(self) -> str:
        """What the syntax is, for people."""
        return f"a name and JSON arguments after {self.opening}"

    def read(self, text: str, parameters: Parameters) -> list[Region]:
        """The stretches of the text that hold calls, as `Syntax.read` has it."""
        regions = opened_regions(text, self._open, self._region)
        return widened(text, regions, self.outer_opening, self.outer_closing)

    def _region(self, text: str, start: int, at: int) -> Region:
        head = self._head.match(text, start)
        if head is None:
            problem = f"the call is not of the form {self.opening}name{self.middle}{{...}}{self.closing}"
            return Region(start, self._end_of_broken(text, at), [Call("", problem=problem)])
        name, call_id = head["name"], head.groupdict().get("id")
        try:
            decoded = decode_json(text, head.end())
        except ValueError as error:
            call = Call(name, id=call_id, problem=f"the arguments of {name} are no valid JSON: {error}")
            return Region(start, self._end_of_broken(text, head.end()), [call])
        call = call_from_arguments(name, decoded.value, call_id)
        close = self._close.match(text, decoded.end) if self.closing else None
        if self.closing and close is None:
            call.arguments = {}
            call.problem = call.problem or f"the call is not closed: {self.closing} is missing behind it"
        return Region(start, close.end() if close else decoded.end, [call])

    def _end_of_broken(self, text: str, at: int) -> int:
        next_open = self._open.search(text, at)
        limit = next_open.start() if next_open else len(text)
        close = self._close.search(text, at, limit) if self.closing else None
        return close.end() if close else limit
