"""Records of a parsed turn, and values of call arguments.

Values are JSON, braces with bare keys, and texts with the type that a tool's schema gives them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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


Parameters = dict[str, dict[str, Any]]
"""Parameter schemas by function name and parameter name."""

# Models write line breaks inside strings unescaped; that is no reason to reject a call.
_DECODER = json.JSONDecoder(strict=False)

_SPACE = re.compile(r"\s*")
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null"}
_PYTHON_CONSTANTS = {"None": None, "True": True, "False": False}


def skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Index behind the match of `pattern` at `at`; `at` itself if there is none."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


def decode_json(text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value at `at` (white space before it is skipped) and the index after it; ValueError if malformed."""
    at = skip(_SPACE, text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
            raise ValueError("it ends too early") from None
        raise ValueError(f"{error.msg} at character {error.pos - at} of {_excerpt(text[at:])}") from None


def decode_braced(text: str, at: int, *, quote: str) -> tuple[Any, int]:
    """The object of `{key:value}` arguments at `at`, as the Gemma family writes them, and the index after it.

    ValueError if it is malformed. Texts stand between `quote` marks; without them a value is a JSON literal, a Python
    constant, or itself a text. It is rewritten as JSON, piece by piece.
    """
    mark = re.escape(quote)
    piece = re.compile(
        rf"\s*(?:{mark}(?P<quoted>.*?){mark}|(?P<mark>[{{}}\[\]:,])|(?P<bare>[^{{}}\[\]:,]+))", re.DOTALL
    )
    written, depth = "", 0
    while (found := piece.match(text, at)) and (depth or not written):
        at = found.end()
        if found["mark"]:
            written += found["mark"]
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found["mark"], 0)
        elif found["bare"] is None:
            written += json.dumps(found["quoted"])
        elif quote in found["bare"]:
            raise ValueError("a text is not closed")
        else:
            written += _bare_as_json(found["bare"].strip(), is_key=text.startswith(":", at))
    return decode_json(written)[0], at


def _bare_as_json(text: str, *, is_key: bool) -> str:
    if is_key:
        return json.dumps(text.strip('"'))
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(_PYTHON_CONSTANTS.get(text, text)) if text else ""
    return text


def call_from_value(value: Any) -> ToolCall:
    """Converts a decoded object to a call.

    Name and arguments may stand in a `function` object or beside each other, and arguments may be a JSON text.
    """
    if not isinstance(value, Mapping):
        return ToolCall("", problem=f"a call must be a JSON object with a name and arguments, not {_excerpt(value)}")
    inner = value.get("function")
    function: Mapping[str, Any] = inner if isinstance(inner, Mapping) else value
    name = next((function[key] for key in _NAME_KEYS if isinstance(function.get(key), str)), "")
    arguments = next((function[key] for key in _ARGUMENT_KEYS if key in function), None)
    call_id = next((value[key] for key in ("id", "call_id") if isinstance(value.get(key), str)), None)
    if not name:
        return ToolCall("", id=call_id, problem=f"the call has no name: {_excerpt(dict(value))}")
    return call_from_arguments(name, arguments, call_id)


def call_from_arguments(name: str, arguments: Any, call_id: str | None = None) -> ToolCall:
    """Builds a call from decoded arguments: an object, a JSON text of one, or None for no arguments."""
    try:
        if isinstance(arguments, str):
            arguments = decode_json(arguments)[0] if arguments.strip() else {}
    except ValueError as error:
        return ToolCall(name, id=call_id, problem=f"the arguments of {name} are no valid JSON: {error}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        problem = f"the arguments of {name} must be a JSON object, not {_excerpt(arguments)}"
        return ToolCall(name, id=call_id, problem=problem)
    return ToolCall(name, {str(key): value for key, value in arguments.items()}, call_id)


def parameter_schemas(schemas: list[dict[str, Any]]) -> Parameters:
    """Schema of each parameter by function name and parameter name."""
    functions = [schema.get("function", schema) for schema in schemas]
    return {
        function.get("name", ""): dict((function.get("parameters") or {}).get("properties") or {})
        for function in functions
    }


def typed_value(text: str, schema: Any) -> Any:
    """Converts a text to a type of its parameter's schema; returns the text itself if it fits no type.

    The check of the arguments against the schema can then name the text that does not fit.
    """
    types = _schema_types(schema)
    stripped = text.strip()
    if "null" in types and stripped in ("null", "None"):
        return None
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    is_integer = re.fullmatch(r"[+-]?\d{1,4000}", stripped) is not None
    if is_integer and ("integer" in types or ("number" in types and len(stripped) < 400)):
        return int(stripped)
    if "number" in types and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", stripped) and len(stripped) < 400:
        return float(stripped)
    if ("array" in types and stripped.startswith("[")) or ("object" in types and stripped.startswith("{")):
        try:
            value, end = decode_json(stripped)
        except ValueError:
            return text
        return value if end == len(stripped) else text
    return text


def _schema_types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    types = {name for name in names if isinstance(name, str)}
    types |= {"null"} if schema.get("nullable") else set()
    for option in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        types |= _schema_types(option)
    return types or {_JSON_TYPES.get(type(value), "string") for value in schema.get("enum") or []}


def _excerpt(value: Any, limit: int = 120) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text) if isinstance(value, str) and len(text) <= limit else text[:limit] + "..." * (len(text) > limit)
