"""Converts numbers and switches that are given as text, such as YAML's `1e-6` and quoted values."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any

SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NUMBERS = (int, float)


def parse_texts(config: Any) -> list[str]:
    """Replaces the texts of fields that take no text by their values; a sentence for each that has none."""
    problems = []
    for name, kinds in _kinds_of_fields(type(config)).items():
        text = getattr(config, name, None)
        if not isinstance(text, str):
            continue
        try:
            setattr(config, name, _parsed(text.strip().lower(), kinds))
        except ValueError:
            wanted = "True or False" if bool in kinds else "a number"
            problems.append(f"{name}={text!r} is a text. Set it to {wanted}")
    return problems


def _parsed(text: str, kinds: tuple[type, ...]) -> Any:
    """The value of a text as one of these types. ValueError if it is none."""
    if text in ("none", "null") and type(None) in kinds:
        return None
    if bool in kinds:
        if text not in SWITCHES:
            raise ValueError(text)
        return SWITCHES[text]
    number = float(text)
    if not math.isfinite(number) or (float not in kinds and not number.is_integer()):
        raise ValueError(text)
    return int(number) if int in kinds and number.is_integer() else number


@functools.cache
def _kinds_of_fields(record: type) -> dict[str, tuple[type, ...]]:
    """Types of the fields of a dataclass that take a switch or a number, and neither a text nor anything else."""
    found: dict[str, tuple[type, ...]] = {}
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hint) if is_union else (hint,)
        if any(kind in (bool, *_NUMBERS) for kind in kinds) and set(kinds) <= {bool, *_NUMBERS, type(None)}:
            found[field.name] = kinds
    return found
