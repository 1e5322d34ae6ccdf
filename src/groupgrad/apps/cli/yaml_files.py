"""Reads the YAML of runs and sweeps: files, and the values of `--set`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Reads 1e-5 as a number, as YAML 1.2 does. Refuses a key that is there twice, of which YAML would take the last
    one."""

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


_EXPONENT = re.compile(r"[-+]?(\d+|\d*\.\d+|\d+\.)[eE][-+]?\d+")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def read_settings(path: str | Path, what: str = "--config") -> dict[Any, Any]:
    """The keys of a YAML file. ValueError, which begins with `what` and the path, for a bad file."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, (dict, type(None))):
        raise ValueError(f"{what} {path} holds a {type(content).__name__}, not keys with values")
    return content or {}


def read_setting(setting: str) -> tuple[str, Any]:
    """Key and value of `--set KEY=VALUE`; `a.b` is the key b of the dict a. ValueError for what is no such setting."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {setting}: it has no value; write it as KEY=VALUE")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(
            f"--set {setting}: the value is not YAML: {' '.join(str(error).split())}; put a text with such characters "
            "in quotes"
        ) from None
    name, point, inner = key.partition(".")
    return name.replace("-", "_") + point + inner, value
