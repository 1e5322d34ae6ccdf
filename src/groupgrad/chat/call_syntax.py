"""Call syntaxes with tags: one search loop, and a parser for the text between the tags of each notation.

transformers' response parser executes response templates of the same shape, but it accepts a call whose closing tag
is missing, rejects the whole turn for one malformed call, and does not report where a call stands in the text.
"""

from __future__ import annotations

import ast
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupgrad.chat.records import CallSpan, Parameters, ToolCall
from groupgrad.chat.values import call_from_arguments, call_from_value, decode_braced, decode_json, skip, typed_value

_SEPARATOR = re.compile(r"[\s,;]*")
_PYTHON_TAG = re.compile(re.escape("<|python_tag|>") + r"\s*")
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_CALL_START = re.compile(r"\[?\s*\{\s*\"(name|type|function)\"")


def literal_pattern(literal: str) -> str:
    """Pattern of a literal text in which runs of white space match any amount of it, none included."""
    return r"\s*".join(re.escape(word) for word in literal.split())


def _padded_pattern(literal: str) -> str:
    """`literal_pattern` that also takes white space at both ends."""
    return r"\s*" + literal_pattern(literal) + (r"\s*" if literal.strip() else "")


@dataclass(slots=True, frozen=True)
class Tags:
    """Literal texts around a call."""

    opening: str
    closing: str = ""
    """Empty if nothing but its arguments ends a call."""
    outer_opening: str = ""
    """Stands once, before the first call of a turn."""
    outer_closing: str = ""
    """Stands once, after the last call of a turn."""
    in_list: bool = False
    """The calls of a turn stand in one list between the tags."""


class MalformedCall(Exception):
    """A call that cannot be parsed. The search for the next call resumes at `end`; `before` has the calls before it."""

    def __init__(
        self, end: int, problem: str, name: str = "", call_id: str | None = None, before: Sequence[ToolCall] = ()
    ):
        self.end, self.calls = end, [*before, ToolCall(name, id=call_id, problem=problem)]


class TaggedCalls(ABC):
    """Base of the syntaxes: finds opening tags, has the text behind each parsed, and expects the closing tag."""

    def __init__(self, tags: Tags, name: str):
        if not tags.opening:
            raise ValueError("no tag opens a call")
        self.tags = tags
        self.name = name
        self._opening = re.compile(literal_pattern(tags.opening) + r"\s*")
        # A search for white space before a tag would take its square in time, so this one is only matched.
        self._closing = re.compile(r"\s*" + literal_pattern(tags.closing))
        self._outer_opening = re.compile(literal_pattern(tags.outer_opening) + r"\s*\Z")
        self._outer_closing = re.compile(r"\s*" + literal_pattern(tags.outer_closing))

    @abstractmethod
    def _parse(self, text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        """The calls behind an opening tag that ends at `at`, and the index behind them; MalformedCall for others."""

    def read(self, text: str, parameters: Parameters) -> list[CallSpan]:
        """Parses all calls of a text, in order. Never raises: a malformed call is a call with a `problem`."""
        spans: list[CallSpan] = []
        at = 0
        while opening := self._opening.search(text, at):
            span = self._span(text, at, opening, parameters)
            spans.append(span)
            at = max(span.end, opening.end())
        return spans

    def _span(self, text: str, at: int, opening: re.Match[str], parameters: Parameters) -> CallSpan:
        start, tags = opening.start(), self.tags
        try:
            calls, end = self._parse(text, opening.end(), parameters)
        except MalformedCall as malformed:
            calls, end = malformed.calls, malformed.end
        else:
            if closing := self._closing.match(text, end):
                end = closing.end() if tags.closing else end
            else:
                for call in calls:
                    call.arguments, call.problem = {}, call.problem or self._unclosed(call.name)
        if tags.outer_opening and (outer := self._outer_opening.search(text, at, start)):
            start = outer.start()
        if tags.outer_closing and (outer := self._outer_closing.match(text, end)):
            end = outer.end()
        return CallSpan(start, end, calls)

    def _unclosed(self, name: str = "") -> str:
        return f"the call{name and ' of ' + name} is not closed: {self.tags.closing} is missing behind it"


class JsonCalls(TaggedCalls):
    """Calls as JSON objects with a name and arguments: one or several between tags, or one list of them."""

    def __init__(self, tags: Tags):
        notation = "a JSON list of calls" if tags.in_list else "JSON objects"
        place = f"in {tags.opening} tags" if tags.closing else f"after {tags.opening}"
        super().__init__(tags, f"{notation} {place}")

    def _parse(self, text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while True:
            try:
                value, end = decode_json(text, at)
            except ValueError as error:
                raise MalformedCall(at, f"the call is no valid JSON: {error}", before=calls) from None
            calls += map(call_from_value, _as_list(value))
            at = skip(_SEPARATOR, text, end)
            if not text.startswith("{", at):
                return calls, end


class BareJson:
    """Calls as JSON objects that are the whole turn, as Llama 3 writes them; more objects may follow after `;`."""

    name: str = "bare JSON objects"

    def read(self, text: str, parameters: Parameters) -> list[CallSpan]:
        """Parses all calls of a text, in order. Never raises: a malformed call is a call with a `problem`."""
        tag = _PYTHON_TAG.search(text)
        start, at = tag.span() if tag else (0, len(text) - len(text.lstrip()))
        calls: list[ToolCall] = []
        end = at
        while text.startswith(("{", "["), at):
            try:
                value, value_end = decode_json(text, at)
            except ValueError as error:
                if calls or _CALL_START.match(text, at):
                    calls.append(ToolCall("", problem=f"the call is no valid JSON: {error}"))
                    end = len(text)
                break
            values = _as_list(value)
            if not values or not all(map(_looks_like_call, values)):
                break
            calls += map(call_from_value, values)
            end = value_end
            at = skip(_SEPARATOR, text, end)
        return [CallSpan(start, end, calls)] if calls else []


class NamedArguments(TaggedCalls):
    """Calls as a name and an object with the arguments, with fixed texts before, between and behind.

    The object is JSON, or `{key:value}` with bare keys if `quote` is given: the mark at both ends of a text, which may
    be empty. `id_example` is a call's id as it stands in `middle`.
    """

    def __init__(self, tags: Tags, middle: str = "", *, id_example: str = "", quote: str | None = None):
        self._is_json = is_json = quote is None
        super().__init__(tags, f"{'a name and JSON arguments' if is_json else 'name{key:value}'} after {tags.opening}")
        self._middle = middle
        self._notation = "JSON" if is_json else "{key:value} text"
        self._decode = decode_json if quote is None else functools.partial(decode_braced, quote=quote)
        pattern = _padded_pattern(middle)
        if id_example:
            before, behind = middle.split(id_example, 1)
            pattern = _padded_pattern(before) + r"(?P<id>[\w.:-]+)" + _padded_pattern(behind)
        excluded = r"\s<>{}\[\]\"'" if is_json else r"\s<>{}"
        self._head = re.compile(rf"(?P<name>[^{excluded}]+?)" + pattern + r"(?=\{)")

    def _parse(self, text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        head = self._head.match(text, at)
        if head is None:
            form = f"{self.tags.opening}name{self._middle}{{...}}{self.tags.closing}"
            problem = f"the call is not of the form {form}: there is no name with braces behind {self.tags.opening}"
            raise MalformedCall(at, problem)
        name, call_id = head["name"], head.groupdict().get("id")
        try:
            arguments, end = self._decode(text, head.end())
        except ValueError as error:
            problem = f"the arguments of {name} are no valid {self._notation}: {error}"
            raise MalformedCall(head.end(), problem, name, call_id) from None
        if not self._is_json and not self._closing.match(text, end):
            # A value without quotes may have run past the next opening tag: resume before it.
            raise MalformedCall(at, self._unclosed(name), name)
        return [call_from_arguments(name, arguments, call_id)], end


class KeyedArguments(TaggedCalls):
    """Calls as a name and `name_end`, then (`key_opening` key `key_end` value `value_end`) for each argument.

    Values are texts; the tool's schema gives them their type.
    """

    def __init__(self, tags: Tags, name_end: str, key_opening: str, key_end: str, value_end: str):
        opening = "".join(tags.opening.split())
        super().__init__(tags, f"keys and values ({key_opening.strip()}...) after {opening}")
        self._value_end = value_end.strip()
        self._head = re.compile(r"(?P<name>[^\s<>\"']+)" + _padded_pattern(name_end))
        # White space that the template puts next to a value is matched once and exactly: more of it belongs to the
        # value.
        gap = key_end[len(key_end.rstrip()) :]
        self._key = re.compile(
            rf"\s*{literal_pattern(key_opening)}\s*(?P<key>[^\s<>](?:[^\n<>]*?[^\s<>])??)"
            rf"\s*{literal_pattern(key_end)}(?:{re.escape(gap)})?"
        )
        gap = value_end[: len(value_end) - len(value_end.lstrip())]
        self._value = re.compile(
            rf"(?P<value>.*?)(?:{re.escape(gap)})?{literal_pattern(value_end)}"
            rf"(?=\s*(?:{literal_pattern(key_opening)}|{literal_pattern(tags.closing)}|\Z))",
            re.DOTALL,
        )

    def _parse(self, text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        following = self._opening.search(text, at)
        limit = following.start() if following else len(text)
        head = self._head.match(text, at, limit)
        if head is None:
            raise MalformedCall(at, f"the call has no name behind {self.tags.opening}")
        call, at = ToolCall(head["name"]), head.end()
        schemas = parameters.get(call.name, {})
        while key := self._key.match(text, at):
            value = self._value.match(text, key.end(), limit)
            if value is None:
                problem = f"the argument {key['key']!r} of {call.name} is not closed by {self._value_end}"
                raise MalformedCall(at, problem, call.name)
            call.arguments[key["key"]] = typed_value(value["value"], schemas.get(key["key"]))
            at = value.end()
        return [call], at


class PythonCalls(TaggedCalls):
    """A list of Python calls, or a single one, between tags."""

    def __init__(self, tags: Tags):
        super().__init__(tags, f"a list of Python calls in {tags.opening} tags")
        self._closing_tag = re.compile(literal_pattern(tags.closing))

    def _parse(self, text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        closing = self._closing_tag.search(text, at)
        if closing is None:
            raise MalformedCall(len(text), self._unclosed())
        return _parse_calls(text[at : closing.start()].strip()), closing.start()


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _looks_like_call(value: object) -> bool:
    """True for an object with both parts of a call; any other JSON object is taken for an answer."""
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("function"), dict):
        return True
    is_named = isinstance(value.get("name"), str) or isinstance(value.get("function"), str)
    return is_named and ("parameters" in value or "arguments" in value)


def _parse_calls(source: str) -> list[ToolCall]:
    # Some templates write line breaks inside texts unescaped, which Python rejects.
    expression = _parse_expression(source) or _parse_expression(source.replace("\n", "\\n"))
    if expression is None:
        return [ToolCall("", problem=f"the call is no list of the form [name(key=value)]: {source[:120]!r}")]
    nodes = expression.elts if isinstance(expression, (ast.List, ast.Tuple)) else [expression]
    return [_parse_call(node) for node in nodes]


def _parse_expression(source: str) -> ast.expr | None:
    try:
        return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _parse_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        return ToolCall("", problem=f"{ast.unparse(node)[:120]} is no call of the form name(key=value)")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return ToolCall(name, problem=f"the arguments of {name} must all be given by name: key=value")
    try:
        return ToolCall(name, {keyword.arg or "": _constant(keyword.value) for keyword in node.keywords})
    except (ValueError, TypeError, RecursionError):  # TypeError: a list is a key of a dict
        return ToolCall(name, problem=f"the arguments of {name} must be plain values")


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_CONSTANTS:
        return _JSON_CONSTANTS[node.id]
    if isinstance(node, ast.Dict):
        return {_constant(key): _constant(value) for key, value in zip(node.keys, node.values) if key is not None}
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_constant(item) for item in node.elts]
    return ast.literal_eval(node)
