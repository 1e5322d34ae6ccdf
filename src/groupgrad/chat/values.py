"""Values of call arguments: JSON, braces with bare keys, and texts with the type that a tool's schema gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from groupgrad.chat.records import ToolCall

Parameters = dict[str, dict[str, Any]]
"""Parameter schemas by function name and parameter name."""

# Models write line breaks inside strings unescaped; that is no reason to reject a call.
_DECODER = json.JSONDecoder(strict=False)

_SPACE = re.compile(r"\s*")
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null"}
_PYTHON_CONSTANTS = {"None": None, "True": True, "False": False}
_COMMA = re.compile(r"\s*,?\s*")
_VALUE_END = re.compile(r"[,}\]]")
_KEY_END = re.compile(":")


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
    constant, or itself a text.
    """
    try:
        return _decode_braced_value(text, skip(_SPACE, text, at), quote)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _decode_braced_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    if text.startswith(("{", "["), at):
        return _decode_braced_items(text, at, quote)
    value, is_quoted, end = _decode_braced_text(text, at, quote, _VALUE_END)
    if is_quoted:
        return value, end
    try:
        return json.loads(value), end
    except ValueError:
        return _PYTHON_CONSTANTS.get(value, value), end


def _decode_braced_items(text: str, at: int, quote: str) -> tuple[Any, int]:
    """Decodes an object or a list. Commas may be missing where an item ends with a quote or bracket."""
    is_object = text[at] == "{"
    closing = "}" if is_object else "]"
    keys: list[str] = []
    values: list[Any] = []
    at = skip(_COMMA, text, at + 1)
    while not text.startswith(closing, at):
        if text.startswith(("}", "]"), at):
            raise ValueError(f"{text[at]} where {closing} or a value should stand")
        if is_object:
            key, is_quoted, at = _decode_braced_text(text, at, quote, _KEY_END)
            keys.append(key if is_quoted else key.strip('"'))
            at = skip(_SPACE, text, at)
            if not text.startswith(":", at):
                raise ValueError(f"a colon is missing behind the key {keys[-1]!r}")
            at = skip(_SPACE, text, at + 1)
        value, at = _decode_braced_value(text, at, quote)
        values.append(value)
        at = skip(_COMMA, text, at)
    return dict(zip(keys, values)) if is_object else values, at + 1


def _decode_braced_text(text: str, at: int, quote: str, bare_end: re.Pattern[str]) -> tuple[str, bool, int]:
    """A text, True if it stands between quote marks, and the index after it; a bare text ends before `bare_end`."""
    if quote and text.startswith(quote, at):
        start = at + len(quote)
        if (end := text.find(quote, start)) < 0:
            raise ValueError("a text is not closed")
        return text[start:end], True, end + len(quote)
    match = bare_end.search(text, at)
    if match is None:
        raise ValueError("it ends too early")
    return text[at : match.start()].strip(), False, match.start()


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
