"""Finds losses, estimators and masks by name, in a package or a module of a user's own, and makes their settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from groupgrad.spelling import did_you_mean

T = TypeVar("T")

_KINDS: dict[type[Any], tuple[str, tuple[type[Any], ...]]] = {
    float: ("number", (int, float)),
    int: ("whole number", (int,)),
    str: ("text", (str,)),
}
"""Type of a setting's default -> what its value must be, in words and types."""


@dataclass(slots=True, frozen=True)
class Range:
    """Values that a setting may have."""

    words: str
    """Such as "more than 0": they end "Set it to"."""
    holds: Callable[[Any], bool]
    """Says if a value is one of them; it has the type of the default."""


MORE_THAN_0 = Range("more than 0", lambda value: value > 0)
NOT_NEGATIVE = Range("0 or more", lambda value: 0 <= value < math.inf)
FRACTION = Range("more than 0, less than 1", lambda value: 0 < value < 1)
FROM_0_TO_1 = Range("a number from 0 to 1", lambda value: 0 <= value <= 1)


def one_of_names(*names: str) -> Range:
    """The range of these texts."""
    return Range(f"{', '.join(names[:-1])} or {names[-1]}", lambda value: value in names)


def setting(default: Any, allowed: Range, why: str) -> Any:
    """A field of a record of settings, with its range. `why` ends the sentence on other values: "leaves no token"."""
    return field(default=default, metadata={"range": allowed, "why": why})


@dataclass(slots=True, frozen=True)
class Registry(Generic[T]):
    """The definitions that an option may name: a file of a package, or the path of a module elsewhere."""

    option: str
    attribute: str
    """Name of the definition in its module."""
    kind: type[T]
    known: Mapping[str, T]

    def find(self, name: str) -> T:
        """The definition of this name. ValueError, with what to set, if there is none."""
        if name in self.known:
            return self.known[name]
        if "." not in name and find_spec(name) is None:
            hint = did_you_mean(name, list(self.known), after=" ")
            raise ValueError(
                f"{self.option}={name!r} is not known: {hint}Set it to one of {', '.join(self.known)}, or to the path "
                f"of a module of yours, such as 'mypackage.my{self.attribute.lower()}'"
            )
        try:
            found = getattr(import_module(name), self.attribute, None)
        except Exception as error:  # a module's own code may raise anything
            raise ValueError(
                f"{self.option}={name!r} cannot be imported ({type(error).__name__}: {error}). "
                "Set it to a module on the path"
            ) from error
        if not isinstance(found, self.kind):
            raise ValueError(
                f"{self.option}={name!r} has no {self.attribute} of type groupgrad.objectives.{self.kind.__name__}. "
                "Define one there"
            )
        return found


def described_settings(known: Mapping[str, Any]) -> str:
    """The settings of definitions by their names, each with its default, and its range if it has one."""
    owners: dict[type[Any], list[str]] = {}
    for name, definition in known.items():
        if definition.settings is not None:
            owners.setdefault(definition.settings, []).append(name)
    return "; ".join(
        f"{', '.join(names)}: {', '.join(map(_with_range, fields(settings)))}" for settings, names in owners.items()
    )


def _with_range(one: Field[Any]) -> str:
    limits: Range | None = one.metadata.get("range")
    return f"{one.name}={one.default}{'' if limits is None else f' ({limits.words})'}"


def registry_of(name: str, paths: Sequence[str], option: str, attribute: str, kind: type[T]) -> Registry[T]:
    """The registry of a package with this name and these `__path__`, each of whose modules has the attribute."""
    modules = {module.name: import_module(f"{name}.{module.name}") for module in iter_modules(paths)}
    return Registry(option, attribute, kind, {key: getattr(module, attribute) for key, module in modules.items()})


def make_settings(settings: type[Any] | None, values: Mapping[str, Any], *, option: str, owner: str) -> Any:
    """Settings of a definition with these values; None if it has none. ValueError for others than it has.

    `option` is where the values are set, `owner` the option that names the definition.
    """
    known = {} if settings is None else {one.name: one for one in fields(settings)}
    for name, value in values.items():
        if name not in known:
            others = f"it has {', '.join(known)}" if known else f"this {owner} has none"
            raise ValueError(f"{option} has {name!r}, but {others}{did_you_mean(name, list(known), before='; ')}")
        default: object = known[name].default
        kind, types = _KINDS.get(type(default), ("", (object,)))
        if not isinstance(value, types) or (kind and isinstance(value, bool)):
            raise ValueError(f"{option} has {name}={value!r}, which is no {kind}")
        limits: Range | None = known[name].metadata.get("range")
        if limits is not None and not limits.holds(value):
            why = known[name].metadata["why"]
            raise ValueError(f"{option} has {name}={value!r}, which {why}. Set it to {limits.words}")
    return None if settings is None else settings(**values)
