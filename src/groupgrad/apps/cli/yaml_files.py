"""Reads the YAML of runs and sweeps: files, and the values of `--set`.

YAML 1.1 parses 1e-5 as text, since it lacks a decimal point. Here it is a number inside of a dict. Outside it stays
text, since a field that takes text keeps it and one that takes numbers reads it. So does what `env` exports.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

_EXPONENT = re.compile(r"[-+]?(\d+|\d*\.\d+|\d+\.)[eE][-+]?\d+")


class _Exponent(str):
    """Such a number as it stands in the file, without quotes."""


class _Loader(yaml.SafeLoader):
    """Marks numbers with an exponent. Refuses a key that is there twice, of which YAML would take the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":  # `<<: *other`
                continue
            name = self.construct_object(key, deep=True)
            if isinstance(name, str) and name.replace("-", "_") in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {name!r} is there twice; remove one", problem_mark=key.start_mark
                )
            seen.add(name.replace("-", "_") if isinstance(name, str) else None)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("!exponent", _EXPONENT, list("-+.0123456789"))
_Loader.add_constructor("!exponent", lambda loader, node: _Exponent(node.value))


def read_settings(path: str | Path, what: str = "--config") -> dict[Any, Any]:
    """The keys of a YAML file. ValueError, which begins with `what` and the path, for a bad file."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} {path} is not YAML: {_one_line(error)}") from None
    if not isinstance(content, (dict, type(None))):
        raise ValueError(f"{what} {path} holds a {type(content).__name__}, not keys with values")
    return _settings(content or {})


def _settings(content: dict[Any, Any]) -> dict[Any, Any]:
    """A mapping whose keys are settings, as are those of a sweep's `base`."""
    return {
        key: _settings(value)
        if key == "base" and isinstance(value, dict)
        else _converted(value, str if key == "env" else float)
        for key, value in content.items()
    }


def read_setting(setting: str, *, numbers: bool = False) -> tuple[str, Any]:
    """Key and value of `--set KEY=VALUE`; `a.b` is the key b of the dict a. ValueError for what is no such setting.

    A number with an exponent is one in a dict, and with `numbers` everywhere.
    """
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {setting}: it has no value; write it as KEY=VALUE")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(
            f"--set {setting}: the value is not YAML: {_one_line(error)}; put a text with such characters in quotes"
        ) from None
    name, point, inner = key.partition(".")
    outside = float if point or numbers else str
    return name.replace("-", "_") + point + inner, _converted(value, float, outside)


def _converted(value: Any, in_dict: Callable[[Any], Any], kind: Callable[[Any], Any] = str) -> Any:
    """A value with its marked numbers converted by `in_dict` inside of dicts, by `kind` outside."""
    if isinstance(value, dict):
        return {key: _converted(item, in_dict, in_dict) for key, item in value.items()}
    if isinstance(value, list):
        return [_converted(item, in_dict, kind) for item in value]
    return kind(value) if isinstance(value, _Exponent) else value


def _one_line(error: Exception) -> str:
    """Describes an error of several lines in one: the problem and its place."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = (problem or "").replace("found character '\\t' that cannot start any token", "a tab; indent by spaces")
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
