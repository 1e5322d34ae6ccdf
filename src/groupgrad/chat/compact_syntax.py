"""Calls written like code: `call:name{key:value}` of the Gemma family, and lists of Python calls."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from typing import Any

from groupgrad.chat.literals import opened_regions, tight, widened
from groupgrad.chat.records import Call, Parameters, Region

_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(slots=True)
class BracedCalls:
    """`opening` name `{` key `:` value `,` ... `}` `closing`, with texts between quote marks of the template's own."""

    opening: str
    closing: str
    quote: str
    outer_opening: str = ""
    outer_closing: str = ""
    _open: re.Pattern[str] = field(init=False)
    _head: re.Pattern[str] = field(init=False)
    _close: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._open = re.compile(tight(self.opening))
        self._head = re.compile(tight(self.opening) + r"\s*(?P<name>[^\s<>{}]+)\s*(?=\{)")
        self._close = re.compile(r"\s*" + tight(self.closing))

    @property
    def name(self) -> str:
        """What the syntax is, for people."""
        return f"name{{key:value}} after {self.opening}"

    def read(self, text: str, parameters: Parameters) -> list[Region]:
        """The stretches of the text that hold calls, as `Syntax.read` has it."""
        regions = opened_regions(text, self._open, self._region)
        return widened(text, regions, self.outer_opening, self.outer_closing)

    def _region(self, text: str, start: int, at: int) -> Region:
        head = self._head.match(text, start)
        name = head["name"] if head else ""
        try:
            if head is None:
                raise ValueError("there is no name with braces behind it")
            reader = _BraceReader(text, head.end(), self.quote)
            arguments = reader.value()
            close = self._close.match(text, reader.at)
            if close is None:
                raise ValueError(f"{self.closing} is missing behind it")
            return Region(start, close.end(), [Call(name, arguments)])
        except (ValueError, RecursionError) as error:
            next_open = self._open.search(text, at)
            limit = next_open.start() if next_open else len(text)
            close = self._close.search(text, at, limit)
            problem = f"the call of {name or 'a tool'} cannot be read: {error}"
            return Region(start, close.end() if close else limit, [Call(name, problem=problem)])


class _BraceReader:
    """Reads one value of the braces notation; `at` is where it goes on."""

    def __init__(self, text: str, at: int, quote: str):
        self.text, self.at, self.quote = text, at, quote

    def value(self) -> Any:
        """The value that begins where the reader stands; ValueError if it is not well-formed."""
        self._skip()
        if self.quote and self.text.startswith(self.quote, self.at):
            return self._quoted(self.quote)
        if self.text.startswith("{", self.at):
            return self._object()
        if self.text.startswith("[", self.at):
            return self._list()
        end = re.compile(r"[,}\]]").search(self.text, self.at)
        if end is None:
            raise ValueError("it ends too early")
        bare = self.text[self.at : end.start()].strip()
        self.at = end.start()
        try:
            return json.loads(bare)
        except ValueError:
            return {"None": None, "True": True, "False": False}.get(bare, bare)

    def _object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.at += 1
        while not self._ends("}"):
            if self.quote and self.text.startswith(self.quote, self.at):
                key = self._quoted(self.quote)
                self._skip()
            else:
                colon = self.text.find(":", self.at)
                if colon < 0:
                    raise ValueError("it ends too early")
                key = self.text[self.at : colon].strip().strip('"')
                self.at = colon
            if not self.text.startswith(":", self.at):
                raise ValueError(f"a colon is missing behind the key {key!r}")
            self.at += 1
            found[key] = self.value()
        return found

    def _list(self) -> list[Any]:
        found: list[Any] = []
        self.at += 1
        while not self._ends("]"):
            found.append(self.value())
        return found

    def _ends(self, mark: str) -> bool:
        self._skip()
        if self.text.startswith(",", self.at):
            self.at += 1
            self._skip()
        if self.at >= len(self.text):
            raise ValueError("it ends too early")
        if self.text.startswith(mark, self.at):
            self.at += 1
            return True
        if self.text[self.at] in "}]":
            raise ValueError(f"{self.text[self.at]} where {mark} or a value should stand")
        return False

    def _quoted(self, quote: str) -> str:
        start = self.at + len(quote)
        end = self.text.find(quote, start)
        if end < 0:
            raise ValueError("a text is not closed")
        self.at = end + len(quote)
        return self.text[start:end]

    def _skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1


@dataclass(slots=True)
class PythonCalls:
    """A list of Python calls with named arguments between tags: `[name(key=value), ...]`."""

    opening: str
    closing: str
    _open: re.Pattern[str] = field(init=False)
    _close: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._open = re.compile(tight(self.opening))
        self._close = re.compile(tight(self.closing))

    @property
    def name(self) -> str:
        """What the syntax is, for people."""
        return f"a list of Python calls in {self.opening} tags"

    def read(self, text: str, parameters: Parameters) -> list[Region]:
        """The stretches of the text that hold calls, as `Syntax.read` has it."""
        regions: list[Region] = []
        at = 0
        while found := self._open.search(text, at):
            close = self._close.search(text, found.end())
            if close is None:
                problem = f"the call is not closed: {self.closing} is missing behind it"
                regions.append(Region(found.start(), len(text), [Call("", problem=problem)]))
                break
            regions.append(Region(found.start(), close.end(), _python_calls(text[found.end() : close.start()])))
            at = close.end()
        return regions


def _python_calls(source: str) -> list[Call]:
    source = source.strip()
    # Some templates write line breaks inside texts as they are, which Python does not take.
    body = _parsed(source) or _parsed(source.replace("\n", "\\n"))
    if body is None:
        return [Call("", problem=f"the call is no list of the form [name(key=value)]: {source[:120]!r}")]
    nodes = body.elts if isinstance(body, (ast.List, ast.Tuple)) else [body]
    return [_python_call(node) for node in nodes]


def _parsed(source: str) -> ast.expr | None:
    try:
        return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        return Call("", problem=f"{ast.unparse(node)[:120]} is no call of the form name(key=value)")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return Call(name, problem=f"the arguments of {name} must all be given by name: key=value")
    try:
        return Call(name, {keyword.arg or "": _constant(keyword.value) for keyword in node.keywords})
    except (ValueError, RecursionError):
        return Call(name, problem=f"the arguments of {name} must be plain values")


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Dict):
        return {_constant(key): _constant(value) for key, value in zip(node.keys, node.values) if key is not None}
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_constant(item) for item in node.elts]
    return ast.literal_eval(node)
