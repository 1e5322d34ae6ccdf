"""Finds losses, estimators and masks by name: each is a file of a package, or a module of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
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
        if "." not in name:
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


def registry_of(name: str, paths: Sequence[str], option: str, attribute: str, kind: type[T]) -> Registry[T]:
    """The registry of a package with this name and these `__path__`, each of whose modules has the attribute."""
    modules = {module.name: import_module(f"{name}.{module.name}") for module in iter_modules(paths)}
    return Registry(option, attribute, kind, {key: getattr(module, attribute) for key, module in modules.items()})


def make_settings(settings: type[Any] | None, values: Mapping[str, Any], *, option: str, owner: str) -> Any:
    """Settings of a definition with these values; None if it has none. ValueError for others than it has.

    `option` is where the values are set, `owner` the option that names the definition.
    """
    defaults: dict[str, object] = {} if settings is None else {field.name: field.default for field in fields(settings)}
    for name, value in values.items():
        if name not in defaults:
            known = f"it has {', '.join(defaults)}" if defaults else f"this {owner} has none"
            raise ValueError(f"{option} has {name!r}, but {known}{did_you_mean(name, list(defaults), before='; ')}")
        kind, allowed = _KINDS.get(type(defaults[name]), ("", (object,)))
        if not isinstance(value, allowed) or (kind and isinstance(value, bool)):
            raise ValueError(f"{option} has {name}={value!r}, which is no {kind}")
    return None if settings is None else settings(**values)
