"""Values in calls: JSON, and texts that get their type from a tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupgrad.chat.records import Call, Parameters

# Models write line breaks inside strings as they are; that is no reason to refuse a call.
_DECODER = json.JSONDecoder(strict=False)

_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")


@dataclass(slots=True, frozen=True)
class Decoded:
    """A JSON value found in a text, and where the text goes on behind it."""

    value: Any
    end: int


def decode_json(text: str, at: int = 0) -> Decoded:
    """The JSON value that begins at a place of the text (white space before it is skipped); ValueError if none does."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
            raise ValueError("it ends too early") from None
        raise ValueError(f"{error.msg} at character {error.pos - at} of {_shown(text[at:])}") from None
    return Decoded(value, end)


def call_from_value(value: Any) -> Call:
    """The call that a decoded object stands for.

    Name and arguments may lie in a `function` object or beside each other, and arguments may be a JSON text.
    """
    if not isinstance(value, Mapping):
        return Call("", problem=f"a call must be a JSON object with a name and arguments, not {_shown(value)}")
    inner = value.get("function")
    holder: Mapping[str, Any] = inner if isinstance(inner, Mapping) else value
    name = next((holder[key] for key in _NAME_KEYS if isinstance(holder.get(key), str)), "")
    arguments = next((holder[key] for key in _ARGUMENT_KEYS if key in holder), None)
    call_id = next((value[key] for key in ("id", "call_id") if isinstance(value.get(key), str)), None)
    if not name:
        return Call("", id=call_id, problem=f"the call has no name: {_shown(dict(value))}")
    return call_from_arguments(name, arguments, call_id)


def call_from_arguments(name: str, arguments: Any, call_id: str | None = None) -> Call:
    """A call of a name with decoded arguments: an object, a JSON text of one, or None for no arguments."""
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments).value if arguments.strip() else {}
        except ValueError as error:
            return Call(name, id=call_id, problem=f"the arguments of {name} are no valid JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return Call(
            name,
            id=call_id,
            problem=f"the arguments of {name} must be a JSON object, not {_shown(arguments)}",
        )
    return Call(name, {str(key): value for key, value in arguments.items()}, call_id)


def parameter_schemas(schemas: list[dict[str, Any]]) -> Parameters:
    """The schema of each parameter by function name and parameter name."""
    found: Parameters = {}
    for schema in schemas:
        function = schema.get("function", schema)
        properties = (function.get("parameters") or {}).get("properties") or {}
        found[function.get("name", "")] = dict(properties)
    return found


def typed_value(text: str, schema: dict[str, Any] | None) -> Any:
    """A text as the value that the parameter's schema asks for; the text itself where the schema has no other use.

    Texts that fit no type of the schema stay texts, so that whoever checks arguments can say what does not fit.
    """
    kinds = _kinds(schema or {})
    plain = text.strip()
    if "null" in kinds and plain in ("null", "None"):
        return None
    if "boolean" in kinds and plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if "integer" in kinds and re.fullmatch(r"[+-]?\d{1,4000}", plain):
        return int(plain)
    if "number" in kinds and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", plain) and len(plain) < 400:
        is_whole = re.fullmatch(r"[+-]?\d+", plain) is not None
        return int(plain) if is_whole else float(plain)
    if ("array" in kinds and plain.startswith("[")) or ("object" in kinds and plain.startswith("{")):
        try:
            decoded = decode_json(plain)
        except ValueError:
            return text
        return decoded.value if decoded.end == len(plain) else text
    return text


def _kinds(schema: dict[str, Any]) -> set[str]:
    kinds: set[str] = set()
    declared = schema.get("type")
    if isinstance(declared, str):
        kinds.add(declared)
    elif isinstance(declared, list):
        kinds.update(kind for kind in declared if isinstance(kind, str))
    for option in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        if isinstance(option, dict):
            kinds |= _kinds(option)
    if schema.get("nullable"):
        kinds.add("null")
    if not kinds and schema.get("enum"):
        names = {bool: "boolean", int: "integer", float: "number", type(None): "null"}
        kinds.update(names.get(type(value), "string") for value in schema["enum"])
    return kinds


def _shown(value: Any, limit: int = 120) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text) if isinstance(value, str) and len(text) <= limit else text[:limit] + "..." * (len(text) > limit)
