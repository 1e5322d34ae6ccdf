"""Reads numbers such as 1e-5 from YAML, which YAML 1.1 parses as text because they lack a decimal point."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

_SHAPE = re.compile(r"[-+]?(\d+|\d*\.\d+|\d+\.)[eE][-+]?\d+")


class _Exponent(str):
    """Such a number as it stands in the file, without quotes."""


class NumberLoader(yaml.SafeLoader):
    """Marks such numbers, for `settings_from` and `value_from`; marked ones are still text."""


NumberLoader.add_implicit_resolver("!exponent", _SHAPE, list("-+.0123456789"))
NumberLoader.add_constructor("!exponent", lambda loader, node: _Exponent(node.value))


def settings_from(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Settings as `NumberLoader` reads them, with numbers inside of dicts.

    Outside of a dict they stay text, since a field that takes text keeps it and one that takes numbers reads it. So
    does what `env` exports.
    """
    return {key: value_from(value, in_dict=False) if key != "env" else _text(value) for key, value in content.items()}


def value_from(value: Any, *, in_dict: bool) -> Any:
    """One value of `NumberLoader`, which stands in a dict or not."""
    if isinstance(value, dict):
        return {key: value_from(item, in_dict=True) for key, item in value.items()}
    if isinstance(value, list):
        return [value_from(item, in_dict=in_dict) for item in value]
    if isinstance(value, _Exponent):
        return float(value) if in_dict else str(value)
    return value


def _text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _text(item) for key, item in value.items()}
    return str(value) if isinstance(value, _Exponent) else value
