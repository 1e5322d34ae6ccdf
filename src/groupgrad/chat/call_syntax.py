"""The notations in which model families write tool calls: a table, and a parser for each kind of notation.

transformers' response parser reads the same notations, but it accepts a call whose closing tag is missing, rejects the
whole turn for one malformed call, and does not report where a call stands in the text.
"""

from __future__ import annotations

import ast
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupgrad.chat.probe import CALL, SCHEMAS, SECOND_CALL, ProbeRenderings
from groupgrad.chat.values import (
    Parameters,
    ToolCall,
    call_from_arguments,
    call_from_value,
    decode_braced,
    decode_json,
    parameter_schemas,
    skip,
    typed_value,
)

_SEPARATOR = re.compile(r"[\s,;]*")
_PYTHON_TAG = re.compile(re.escape("<|python_tag|>") + r"\s*")
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_CALL_START = re.compile(r"\[?\s*\{\s*\"(name|type|function)\"")


@dataclass(slots=True)
class CallSpan:
    """Calls of a turn with their place in its text, `text[start:end]`, tags included."""

    start: int
    end: int
    """After a malformed call: where the search for the next call resumes."""
    calls: list[ToolCall]

    @property
    def is_well_formed(self) -> bool:
        """True if the syntax has no objection to any call of the span."""
        return all(call.problem is None for call in self.calls)


class MalformedCall(Exception):
    """A call that cannot be parsed. The search for the next call resumes at `end`; `before` has the calls before it."""

    def __init__(
        self, end: int, problem: str, name: str = "", call_id: str | None = None, before: Sequence[ToolCall] = ()
    ):
        self.end, self.calls = end, [*before, ToolCall(name, id=call_id, problem=problem)]


class CallSyntax(ABC):
    """Parser of the tool calls in a turn's text."""

    name: str
    """Description for logs and error messages."""

    @abstractmethod
    def read(self, text: str, parameters: Parameters) -> list[CallSpan]:
        """Parses all calls of a text, in order. Never raises: a malformed call is a call with a `problem`."""

    def split_reasoning(self, text: str) -> tuple[str | None, str] | None:
        """The reasoning of a turn and the rest, where the notation itself marks reasoning; None where it does not."""
        return None


def literal_pattern(literal: str) -> str:
    """Pattern of a literal text in which runs of white space match any amount of it, none included."""
    return r"\s*".join(re.escape(word) for word in literal.split())


class TaggedCalls(CallSyntax):
    """Calls between literal tags: finds opening tags, has the text behind each parsed, and expects the closing tag.

    `closing` is empty if nothing but its arguments ends a call. `outer` are the texts that stand once in a turn, before
    the first call and behind the last.
    """

    def __init__(self, opening: str, closing: str, name: str, outer: tuple[str, str] = ("", "")):
        self.opening, self.closing, self.name = opening, closing, name
        self._outer = outer
        self._opening = re.compile(literal_pattern(opening) + r"\s*")
        # A search for white space before a tag would take its square in time, so this one is only matched.
        self._closing = re.compile(r"\s*" + literal_pattern(closing))
        self._outer_opening = re.compile(literal_pattern(outer[0]) + r"\s*\Z")
        self._outer_closing = re.compile(r"\s*" + literal_pattern(outer[1]))

    @abstractmethod
    def _parse(self, text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        """The calls behind an opening tag that ends at `at`, and the index behind them; MalformedCall for others."""

    def read(self, text: str, parameters: Parameters) -> list[CallSpan]:
        spans: list[CallSpan] = []
        at = 0
        while opening := self._opening.search(text, at):
            span = self._span(text, at, opening, parameters)
            spans.append(span)
            at = max(span.end, opening.end())
        return spans

    def _span(self, text: str, at: int, opening: re.Match[str], parameters: Parameters) -> CallSpan:
        start = opening.start()
        try:
            calls, end = self._parse(text, opening.end(), parameters)
        except MalformedCall as malformed:
            calls, end = malformed.calls, malformed.end
        else:
            if closing := self._closing.match(text, end):
                end = closing.end() if self.closing else end
            else:
                for call in calls:
                    call.arguments, call.problem = {}, call.problem or self._unclosed(call.name)
        if self._outer[0] and (outer := self._outer_opening.search(text, at, start)):
            start = outer.start()
        if self._outer[1] and (outer := self._outer_closing.match(text, end)):
            end = outer.end()
        return CallSpan(start, end, calls)

    def _unclosed(self, name: str = "") -> str:
        return f"the call{name and ' of ' + name} is not closed: {self.closing} is missing behind it"


class JsonCalls(TaggedCalls):
    """Calls as JSON objects with a name and arguments: one or several between tags, or one list of them."""

    def __init__(self, opening: str, closing: str = ""):
        place = f"in {opening} tags" if closing else f"after {opening}"
        super().__init__(opening, closing, f"JSON objects {place}")

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


class BareJson(CallSyntax):
    """Calls as JSON objects that are the whole turn, as Llama 3 writes them; more objects may follow after `;`."""

    name = "bare JSON objects"

    def read(self, text: str, parameters: Parameters) -> list[CallSpan]:
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

    The object is JSON, or `{key:value}` with bare keys if `quote` is given: the mark at both ends of a text. `middle`
    is the text between name and object, `id_mark` what may stand before it with the call's id.
    """

    def __init__(
        self,
        opening: str,
        middle: str,
        closing: str,
        *,
        outer: tuple[str, str] = ("", ""),
        id_mark: str = "",
        quote: str | None = None,
    ):
        self._is_json = is_json = quote is None
        notation = "a name and JSON arguments" if is_json else "name{key:value}"
        super().__init__(opening, closing, f"{notation} after {opening}", outer)
        self._middle = middle
        self._notation = "JSON" if is_json else "{key:value} text"
        self._decode = decode_json if quote is None else functools.partial(decode_braced, quote=quote)
        call_id = rf"(?:\s*{literal_pattern(id_mark)}\s*(?P<id>[\w.:-]+))?" if id_mark else ""
        between = rf"\s*{literal_pattern(middle)}\s*" if middle else r"\s*"
        excluded = r"\s<>{}\[\]\"'" if is_json else r"\s<>{}"
        self._head = re.compile(rf"(?P<name>[^{excluded}]+?){call_id}{between}(?=\{{)")

    def _parse(self, text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        head = self._head.match(text, at)
        if head is None:
            form = f"{self.opening}name{self._middle}{{...}}{self.closing}"
            problem = f"the call is not of the form {form}: there is no name with braces behind {self.opening}"
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
    """Calls as a name and `name_end`, then (`key[0]` key `key[1]` value `value_end`) for each argument.

    Values are texts; the tool's schema gives them their type. `gap` is the white space that the template puts at both
    ends of a value: more of it belongs to the value.
    """

    def __init__(
        self,
        opening: str,
        name_end: str,
        key: tuple[str, str],
        value_end: str,
        closing: str,
        *,
        gap: str = "",
        outer: tuple[str, str] = ("", ""),
    ):
        super().__init__(opening, closing, f"keys and values ({key[0]}...) after {opening}", outer)
        self._value_end = value_end
        self._head = re.compile(rf"(?P<name>[^\s<>\"']+)\s*{literal_pattern(name_end)}")
        key_opening, gap = literal_pattern(key[0]), f"(?:{gap})?"
        self._key = re.compile(
            rf"\s*{key_opening}\s*(?P<key>[^\s<>](?:[^\n<>]*?[^\s<>])??)\s*{literal_pattern(key[1])}{gap}"
        )
        self._value = re.compile(
            rf"(?P<value>.*?){gap}{literal_pattern(value_end)}(?=\s*(?:{key_opening}|{literal_pattern(closing)}|\Z))",
            re.DOTALL,
        )

    def _parse(self, text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        following = self._opening.search(text, at)
        limit = following.start() if following else len(text)
        head = self._head.match(text, at, limit)
        if head is None:
            raise MalformedCall(at, f"the call has no name behind {self.opening}")
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

    def __init__(self, opening: str, closing: str):
        super().__init__(opening, closing, f"a list of Python calls in {opening} tags")
        self._closing_tag = re.compile(literal_pattern(closing))

    def _parse(self, text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        closing = self._closing_tag.search(text, at)
        if closing is None:
            raise MalformedCall(len(text), self._unclosed())
        return _parse_calls(text[at : closing.start()].strip()), closing.start()


class Channels(CallSyntax):
    """The channels of GPT-OSS: a turn is a sequence of messages, each with a header and a body.

    A message with `to=functions.name` in its header calls a function with its body as JSON arguments; a message in the
    analysis channel is reasoning.
    """

    name = "channels with to=functions.name"

    _START = "<|start|>assistant"
    # <|call|> and <|return|> end a turn, <|end|> ends a message within it.
    _END = re.compile(r"<\|(?:end|call|return)\|>")
    _CALL = re.compile(
        r"\bto=functions\.(?P<name>[^\s<]+)[^<\n]{0,80}(?:<\|(?:channel|constrain)\|>[^<\n]{0,80}){0,4}<\|message\|>"
    )
    _BOUNDARY = re.compile(r"(?P<start><\|start\|>)|<\|(?:end|call|return|message)\|>")

    def read(self, text: str, parameters: Parameters) -> list[CallSpan]:
        spans: list[CallSpan] = []
        at = 0
        while header := self._CALL.search(text, at):
            start, name = at, header["name"]
            for boundary in self._BOUNDARY.finditer(text, at, header.start()):
                start = boundary.start() if boundary["start"] else boundary.end()
            try:
                arguments, at = decode_json(text, header.end())
                call = call_from_arguments(name, arguments)
            except ValueError as error:
                call = ToolCall(name, problem=f"the arguments of {name} are no valid JSON: {error}")
                end = self._END.search(text, header.end())
                at = end.start() if end else len(text)
            spans.append(CallSpan(start, at, [call]))
        return spans

    def split_reasoning(self, text: str) -> tuple[str | None, str]:
        """Separates the bodies of the analysis channel from bodies for the user and whole messages to functions."""
        reasoning: list[str] = []
        rest: list[str] = []
        for message in text.split(self._START):
            header, marker, body = message.partition("<|message|>")
            if not marker:
                rest.append(message)
            elif "to=functions." in header:
                rest.append(self._START + message)
            else:
                is_reasoning = "<|channel|>analysis" in header
                (reasoning if is_reasoning else rest).append(self._END.split(body, maxsplit=1)[0])
        return "\n".join(reasoning) if reasoning else None, "".join(rest)


FAMILIES: tuple[CallSyntax, ...] = (
    Channels(),  # GPT-OSS
    # Hermes, Qwen 2.5, Qwen 3, Granite 4, Falcon 3
    JsonCalls("<tool_call>", "</tool_call>"),
    # Qwen 3 Coder, Qwen 3.5, Nemotron 3
    KeyedArguments(
        *("<tool_call> <function=", ">", ("<parameter=", ">"), "</parameter>", "</function> </tool_call>"), gap="\n"
    ),
    # GLM 4.5 and later
    KeyedArguments("<tool_call>", "", ("<arg_key>", "</arg_key> <arg_value>"), "</arg_value>", "</tool_call>"),
    # MiniMax M2
    KeyedArguments(
        *('<invoke name="', '">', ('<parameter name="', '">'), "</parameter>", "</invoke>"),
        outer=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    # Mistral up to Small 3.1, and later ones
    JsonCalls("[TOOL_CALLS]"),
    NamedArguments("[TOOL_CALLS]", "[ARGS]", "", id_mark="[CALL_ID]"),
    # DeepSeek V3 and R1, and V3.1
    NamedArguments(
        *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "```json", "``` <｜tool▁call▁end｜>"),
        outer=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    NamedArguments(
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        outer=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    # Gemma 4, and FunctionGemma
    NamedArguments("<|tool_call>call:", "", "<tool_call|>", quote='<|"|>'),
    NamedArguments("<start_function_call>call:", "", "<end_function_call>", quote="<escape>"),
    PythonCalls("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM 2
    JsonCalls("<|START_ACTION|>", "<|END_ACTION|>"),  # Command R7B
    JsonCalls("<TOOLCALL>", "</TOOLCALL>"),  # Nemotron Nano 2
    JsonCalls("<|tool_call|>"),  # Granite 3
    BareJson(),  # Llama 3.1 and later
)
"""Call syntaxes in the order in which a template's calls are tried on them."""


def find_syntax(probes: ProbeRenderings) -> CallSyntax | None:
    """The first syntax of the table that parses the probe calls back with the same types and order, or None."""
    parameters = parameter_schemas(SCHEMAS)
    rendered = [(probes.one_call, [CALL]), (probes.two_calls, [CALL, SECOND_CALL])]
    for syntax in FAMILIES if probes.one_call else ():
        found = [
            [call for span in syntax.read(text, parameters) for call in span.calls] for text, _ in rendered if text
        ]
        if _plain(found) == _plain([calls for text, calls in rendered if text]):
            return syntax
    return None


def _plain(turns: list[list[ToolCall]]) -> list[list[tuple[Any, ...]]]:
    """Calls without their ids, which not every notation has."""
    return [[(call.name, call.arguments, call.problem) for call in calls] for calls in turns]


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


class _JsonNames(ast.NodeTransformer):
    """Replaces the constants of JSON in Python source by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_CONSTANTS[node.id]) if node.id in _JSON_CONSTANTS else node


def _parse_calls(source: str) -> list[ToolCall]:
    # Some templates write line breaks inside texts unescaped, which Python rejects.
    expression = _parse_expression(source) or _parse_expression(source.replace("\n", "\\n"))
    if expression is None:
        return [ToolCall("", problem=f"the call is no list of the form [name(key=value)]: {source[:120]!r}")]
    nodes = expression.elts if isinstance(expression, (ast.List, ast.Tuple)) else [expression]
    return [_parse_call(node) for node in nodes]


def _parse_expression(source: str) -> ast.expr | None:
    try:
        return _JsonNames().visit(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _parse_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        return ToolCall("", problem=f"{ast.unparse(node)[:120]} is no call of the form name(key=value)")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return ToolCall(name, problem=f"the arguments of {name} must all be given by name: key=value")
    try:
        return ToolCall(name, {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in node.keywords})
    except (ValueError, TypeError, RecursionError):  # TypeError: a list is a key of a dict
        return ToolCall(name, problem=f"the arguments of {name} must be plain values")
