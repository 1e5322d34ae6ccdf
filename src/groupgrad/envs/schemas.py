"""JSON schemas of tools, and the check of a call's arguments against them."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from groupgrad.concurrency.callables import bound_keywords, innermost

MAX_VALUE_CHARS = 200
"""Characters of a wrong value that an error quotes."""

_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
    "string": ("a string", (str,)),
    "boolean": ("a boolean", (bool,)),
    "null": ("null", (type(None),)),
    "array": ("an array", (list, tuple)),
    "object": ("an object", (dict,)),
}
"""Words and Python types of each JSON type."""


def describe(function: Callable[..., Any], name: str, where: str) -> dict[str, Any]:
    """A callable's JSON schema in the form of chat templates, by transformers' `get_json_schema`.

    Arguments that a `functools.partial` has set are left out. `where` names the callable in errors. TypeError if it
    cannot be called with keywords; ValueError for what `get_json_schema` refuses: a missing docstring, hint or
    description of an argument, and a hint that has no JSON counterpart.
    """
    inner, bound = innermost(function), bound_keywords(function)
    signature = _signature(function, where)
    parameters = {key: p for key, p in signature.parameters.items() if key not in bound}
    described = inner if hasattr(inner, "__name__") else type(inner).__call__  # a function, or an object's __call__

    def stub() -> None:
        """Replaces the callable for `get_json_schema`, which takes functions only."""

    stub.__name__, stub.__doc__ = name, inspect.getdoc(described) or inspect.getdoc(inner)
    stub.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=list(parameters.values())
    )
    try:
        hints = typing.get_type_hints(described)
        stub.__annotations__ = {key: hints[key] for key in [*parameters, "return"] if key in hints}
        return get_json_schema(stub)
    except Exception as error:  # it has error types of its own, and a hint may name what its module does not know
        raise ValueError(
            f"{where} cannot be described to a model: {error}. Write a type hint for each argument, and a docstring "
            "with a line 'name: what it is' for each below 'Args:'"
        ) from error


def ready_schema(schema: Any, name: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema that a callable brings as its `tool_schema`, and the default values of arguments that it does not
    require: `inspect.Parameter.empty` for those without one.

    The function gets `name`, and `parameters` are an object with `properties`, on which chat templates rely. ValueError
    for another form than {"type": "function", "function": {"description", "parameters"}}.
    """
    function = schema.get("function") if isinstance(schema, Mapping) else None
    parameters = function.get("parameters", {}) if isinstance(function, Mapping) else None
    properties = parameters.get("properties", {}) if isinstance(parameters, Mapping) else None
    if function is None or parameters is None or not isinstance(properties, Mapping):
        raise ValueError(
            f"{where} has a tool_schema that is no schema of a function: {_json_text(schema)}. Give it the form "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {"type": "object", '
            '"properties": {...}, "required": [...]}}}'
        )
    required = parameters.get("required", ())
    defaults = {
        key: value.get("default", inspect.Parameter.empty) if isinstance(value, Mapping) else inspect.Parameter.empty
        for key, value in properties.items()
        if key not in required
    }
    parameters = {**parameters, "type": "object", "properties": dict(properties)}
    function = {"description": "", **function, "name": name, "parameters": parameters}
    return {"type": "function", "function": function}, defaults


def argument_problem(schema: Mapping[str, Any], defaults: Mapping[str, Any], arguments: Any) -> str | None:
    """The reason why arguments do not fit a tool, in words for the model; None if they fit.

    `schema` comes from `describe` or `ready_schema`; keywords that `describe` never writes, such as `pattern`, are not
    checked. `defaults` has the values of arguments that may be left out; an argument whose
    default is None may be null. Nothing is converted: "3" is not an integer, but 3 is a number.
    """
    function = schema["function"]
    properties: dict[str, Any] = function["parameters"].get("properties", {})
    if not isinstance(arguments, dict):
        return f"the arguments must be an object with a value for each name, but are {_json_text(arguments)}"
    missing = [name for name in properties if name not in arguments and name not in defaults]
    is_open = function["parameters"].get("additionalProperties") or "patternProperties" in function["parameters"]
    unexpected = [] if is_open else [name for name in arguments if name not in properties]
    if missing or unexpected:
        problems = [f"the argument '{name}' is missing" for name in missing]
        problems += [f"there is no argument {name!r}" for name in unexpected]
        return f"{'; '.join(problems)}. {_usage(function['name'], properties, defaults)}"
    for name, value in arguments.items():
        if value is None and name in defaults and defaults[name] is None:
            continue
        if (problem := _type_problem(f"the argument '{name}'", value, properties.get(name, True))) is not None:
            return problem
    return None


def _json_text(value: Any) -> str:
    """A value as JSON, cut to `MAX_VALUE_CHARS`."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."


def _in_words(schema: Any) -> str:
    """The values that a schema allows, in a few words: 'an integer or null'."""
    if not isinstance(schema, Mapping):
        return "any value"
    if "enum" in schema:
        words = "one of " + ", ".join(_json_text(value) for value in schema["enum"])
    elif "anyOf" in schema:
        words = " or ".join(_in_words(option) for option in schema["anyOf"])
    else:
        words = " or ".join(_TYPES[name][0] if name in _TYPES else name for name in _types(schema)) or "any value"
        if schema.get("type") == "array" and _types(schema.get("items", {})):
            words = f"{words} with {_in_words(schema['items'])} at each place"
    return f"{words} or null" if schema.get("nullable") else words


def _usage(name: str, properties: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    if not properties:
        return f"'{name}' takes no arguments"
    takes = ", ".join(
        f"{key} ({_in_words(schema)}{', may be left out' if key in defaults else ''})"
        for key, schema in properties.items()
    )
    return f"'{name}' takes: {takes}"


def _types(schema: Any) -> list[str]:
    types = schema.get("type", []) if isinstance(schema, Mapping) else []
    return [types] if isinstance(types, str) else list(types)


def _type_problem(where: str, value: Any, schema: Any) -> str | None:
    """The reason why a value does not fit a schema, or None."""
    if not isinstance(schema, Mapping):  # JSON Schema has true for what fits any value
        return None
    if value is None and schema.get("nullable"):
        return None
    wrong = f"{where} must be {_in_words(schema)}, but is {_json_text(value)}"
    if options := schema.get("anyOf"):
        return None if any(_type_problem(where, value, option) is None for option in options) else wrong
    types = _types(schema)
    # A type that JSON does not have ("image") accepts any value.
    if types and all(name in _TYPES for name in types) and not any(_is(value, name) for name in types):
        return wrong
    if "enum" in schema:
        # Choices written into an array's description apply to its items.
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(any(_equal(item, choice) for choice in schema["enum"]) for item in items):
            return wrong
    return _item_problem(where, value, schema)


def _item_problem(where: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    """The reason why an item of an array or object does not fit the schema, or None."""
    items: list[tuple[str, Any, Any]] = []
    if isinstance(value, (list, tuple)):
        if "prefixItems" in schema:
            expected = schema["prefixItems"]
            if len(value) != len(expected):
                return f"{where} must have {len(expected)} values, but has {len(value)}: {_json_text(value)}"
            items = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(value, expected))]
        elif "items" in schema:
            items = [(f"{where}[{i}]", item, schema["items"]) for i, item in enumerate(value)]
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        items = [(f"{where}[{key!r}]", item, schema["additionalProperties"]) for key, item in value.items()]
    return next((problem for item in items if (problem := _type_problem(*item)) is not None), None)


def _is(value: Any, type_name: str) -> bool:
    if isinstance(value, bool):  # an integer in Python
        return type_name == "boolean"
    return isinstance(value, _TYPES[type_name][1])


def _equal(value: Any, other: Any) -> bool:
    """Equality where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _signature(function: Callable[..., Any], where: str) -> inspect.Signature:
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{where} takes '{parameter}', but tools are called with a keyword for each argument; name each one, "
                "without '*' and '/'"
            )
    return signature
