"""Call syntax of Python calls with keyword arguments: `[name(key=value), ...]` between tags."""

from __future__ import annotations

import ast
from typing import Any

from groupgrad.chat.call_syntax import ParsedBody, TaggedCalls, Tags
from groupgrad.chat.records import Parameters, ToolCall

_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonCalls(TaggedCalls):
    """A list of Python calls, or a single one, between tags."""

    def __init__(self, tags: Tags):
        super().__init__(tags, f"a list of Python calls in {tags.opening} tags")

    def _parse(self, text: str, at: int, parameters: Parameters) -> ParsedBody:
        closing = self._closing.search(text, at)
        if closing is None:
            return ParsedBody([ToolCall("", problem=self._unclosed())], len(text), is_complete=False)
        return ParsedBody(_parse_calls(text[at : closing.start()].strip()), closing.start())


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
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Dict):
        return {_constant(key): _constant(value) for key, value in zip(node.keys, node.values) if key is not None}
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_constant(item) for item in node.elts]
    return ast.literal_eval(node)
