"""What a tool looks like to the model, and whether the arguments that the model gives fit."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema, parse_google_format_docstring

EXAMPLE = '''
    def multiply(a: int, b: int) -> int:
        """
        Multiplies two integers.

        Args:
            a: The first integer.
            b: The second integer.

        Returns:
            The product.
        """'''

SHOWN_CHARACTERS = 200

_IN_WORDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "a boolean",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list, tuple),
    "object": (dict,),
}


def describe(function: Callable[..., Any], name: str, where: str) -> dict[str, Any]:
    """A callable's JSON schema, by transformers' own helper, in the form that chat templates take.

    Arguments that a `functools.partial` has set are left out. `where` names the callable in errors. TypeError if it
    cannot be called with keywords or yields its results; ValueError for a missing docstring, hint or description of an
    argument, and for a hint that has no JSON counterpart.
    """
    inner, bound = _innermost(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise TypeError(f"{where} yields its results, but a model gets one answer to a call; return it instead")
    signature = _signature(function, where)
    parameters = {key: p for key, p in signature.parameters.items() if key not in bound}
    text = inspect.getdoc(inner if _is_plain(inner) else type(inner).__call__) or inspect.getdoc(inner)
    if not text or not text.strip():
        raise ValueError(f"{where} has no docstring, from which the model learns what it does; write one like{EXAMPLE}")
    hints = _hints(inner, where)
    _check_words(text, parameters, hints, where)

    def stub() -> None:
        """Stands for the callable before the helper, which takes functions only."""

    stub.__name__, stub.__doc__ = name, text
    stub.__annotations__ = {key: hints[key] for key in [*parameters, "return"] if key in hints}
    stub.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=list(parameters.values())
    )
    try:
        return get_json_schema(stub)
    except Exception as error:  # the helper has error types of its own
        raise ValueError(f"{where} cannot be described to a model: {error}") from error


def argument_problem(schema: Mapping[str, Any], defaults: Mapping[str, Any], arguments: Any) -> str | None:
    """Why arguments do not fit a tool, in words for the model; None if they do.

    `schema` is `describe`'s, `defaults` the values of arguments that may be left out: one whose default is None may be
    null. Nothing is converted: "3" is no integer, but 3 is a number.
    """
    function = schema["function"]
    properties: dict[str, Any] = function["parameters"].get("properties", {})
    if not isinstance(arguments, dict):
        return f"the arguments must be an object with a value for each name, but are {shown(arguments)}"
    missing = [name for name in properties if name not in arguments and name not in defaults]
    unexpected = [name for name in arguments if name not in properties]
    if missing or unexpected:
        problems = [f"the argument '{name}' is missing" for name in missing]
        problems += [f"there is no argument {name!r}" for name in unexpected]
        return f"{'; '.join(problems)}. {_usage(function['name'], properties, defaults)}"
    for name, value in arguments.items():
        if value is None and name in defaults and defaults[name] is None:
            continue
        if (problem := _misfit(f"the argument '{name}'", value, properties[name])) is not None:
            return problem
    return None


def shown(value: Any) -> str:
    """A value as the model would write it, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def in_words(schema: Mapping[str, Any]) -> str:
    """The values that a schema allows, in a few words: 'an array of integers or null'."""
    if "enum" in schema:
        words = "one of " + ", ".join(shown(value) for value in schema["enum"])
    elif "anyOf" in schema:
        words = " or ".join(in_words(option) for option in schema["anyOf"])
    else:
        words = " or ".join(_type_in_words(kind, schema) for kind in _types(schema)) or "any value"
    return f"{words} or null" if schema.get("nullable") else words


def _type_in_words(kind: str, schema: Mapping[str, Any]) -> str:
    word = _IN_WORDS.get(kind, kind)
    if kind == "array" and _types(schema.get("items", {})):
        return f"{word} with {in_words(schema['items'])} at each place"
    return word


def _usage(name: str, properties: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    if not properties:
        return f"'{name}' takes no arguments"
    takes = ", ".join(
        f"{key} ({in_words(schema)}{', may be left out' if key in defaults else ''})"
        for key, schema in properties.items()
    )
    return f"'{name}' takes: {takes}"


def _types(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)


def _misfit(where: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a value, or None."""
    if value is None and schema.get("nullable"):
        return None
    wrong = f"{where} must be {in_words(schema)}, but is {shown(value)}"
    if options := schema.get("anyOf"):
        return None if any(_misfit(where, value, option) is None for option in options) else wrong
    kinds = _types(schema)
    # Types that JSON does not have ("image") are taken as they come.
    if kinds and all(kind in _PYTHON_TYPES for kind in kinds) and not any(_is(value, kind) for kind in kinds):
        return wrong
    if "enum" in schema:
        # A choice that is written into an array's description is one of its elements.
        values = value if isinstance(value, (list, tuple)) else [value]
        if not all(any(_same(one, other) for other in schema["enum"]) for one in values):
            return wrong
    return _misfit_inside(where, value, schema)


def _misfit_inside(where: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(value, (list, tuple)):
        if "prefixItems" in schema:
            if len(value) != len(schema["prefixItems"]):
                return f"{where} must have {len(schema['prefixItems'])} values, but has {len(value)}: {shown(value)}"
            parts = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(value, schema["prefixItems"]))]
        elif "items" in schema:
            parts = [(f"{where}[{i}]", one, schema["items"]) for i, one in enumerate(value)]
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        parts = [(f"{where}[{key!r}]", one, schema["additionalProperties"]) for key, one in value.items()]
    return next((problem for part in parts if (problem := _misfit(*part)) is not None), None)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # which Python takes for an integer
        return kind == "boolean"
    return isinstance(value, _PYTHON_TYPES[kind])


def _same(value: Any, other: Any) -> bool:
    """Equal, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


# The callable


def _innermost(function: Callable[..., Any]) -> tuple[Callable[..., Any], set[str]]:
    """The callable inside any layers of `functools.partial`, and the names that these set."""
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        bound.update(function.keywords)
        function = function.func
    return function, bound


def _is_plain(function: Callable[..., Any]) -> bool:
    """True for a function or method, false for an object that can be called."""
    return hasattr(function, "__name__")


def _signature(function: Callable[..., Any], where: str) -> inspect.Signature:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} does not say what arguments it takes; wrap it in a function of yours") from error
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise TypeError(
                f"{where} takes {star}{parameter.name}, which a model cannot be told how to fill; name each argument"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(
                f"{where} takes '{parameter.name}' by position only, but tools are called with keywords; remove the "
                "'/' from its signature"
            )
    return signature


def _hints(inner: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inner if _is_plain(inner) else type(inner).__call__)
    except Exception as error:
        raise ValueError(
            f"{where} has a type hint that cannot be read ({type(error).__name__}: {error}); use types that its module "
            "knows when it is imported"
        ) from error


def _check_words(text: str, parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any], where: str) -> None:
    unhinted = [name for name in parameters if name not in hints]
    if unhinted:
        raise ValueError(
            f"{where} has no type hint for {_names(unhinted)}, from which the model learns what to give; write for "
            f"instance '{unhinted[0]}: int'"
        )
    described = parse_google_format_docstring(text.strip())[1] or {}
    missing = [name for name in parameters if name not in described]
    if missing:
        raise ValueError(
            f"{where} does not describe {_names(missing)} in its docstring. Each argument needs a line 'name: what it "
            f"is' below 'Args:', without a type in brackets, as in{EXAMPLE}"
        )


def _names(names: list[str]) -> str:
    return f"the argument{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
