"""Kinds of environments: what a factory of the user's makes, found out from one instance."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from groupgrad.concurrency.workers import Outcome
from groupgrad.envs.tools import Tool, error_text, make_tool

ENV_COLUMN = "environment"
"""Column of the data set that names a row's environment, where there are several."""

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods that are the trainer's to call, not the model's."""


class EnvironmentFault(ValueError):
    """An environment cannot be used; the message is complete as it is."""


@dataclass(slots=True)
class EnvSpec:
    """What one factory makes."""

    name: str
    """The key in the dict of factories; of a single factory, the class's name."""
    factory: Callable[[], Any]
    made: type
    tools: list[Tool]
    columns: frozenset[str] | None
    """Columns of the data set that `reset` takes; None for all."""
    has_reward: bool
    chosen: bool
    """True if rows choose it by their column `environment`, which `reset` is not given then."""
    reward_name: str = ""
    free: list[Any] = field(default_factory=list[Any])
    """Instances that no rollout has."""

    def create(self) -> Any:
        """A new instance; EnvironmentFault if the factory fails or makes something else than at first."""
        try:
            instance = self.factory()
        except Exception as error:
            text = error_text(Outcome(error=error), 0.0)
            raise EnvironmentFault(f"the environment '{self.name}' could not be created: {text}") from error
        if type(instance) is not self.made:
            raise EnvironmentFault(
                f"the factory of the environment '{self.name}' made a {type(instance).__name__}, but a "
                f"{self.made.__name__} at first; give a dict of factories by name for several classes"
            )
        return instance

    def reset_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What `reset` is given: the row's columns that it takes, as copies."""
        return {
            name: copied(value)
            for name, value in row.items()
            if (self.columns is None or name in self.columns) and not (self.chosen and name == ENV_COLUMN)
        }


def named(factories: Any) -> dict[str | None, Any]:
    """Factories by name; None names a single one. ValueError for no factories, TypeError for other keys than texts."""
    if not isinstance(factories, Mapping):
        return {None: factories}
    if not factories:
        raise ValueError("environment_factory={}: it has no environment; name at least one, or leave it out")
    for name in factories:
        if not isinstance(name, str):
            raise TypeError(f"environment_factory has the key {name!r}; rows choose environments by name: use texts")
    return dict(factories)


def first_instance(factory: Any, name: str | None) -> Any:
    """What a factory makes at its first call. TypeError for what is no callable, ValueError for one that fails."""
    called = _called(name)
    if not callable(factory):
        raise TypeError(f"{called} is {factory!r}, which cannot be called; give a class, or a function that makes one")
    try:
        instance = factory()
    except Exception as error:
        text = error_text(Outcome(error=error), 0.0)
        raise ValueError(f"{called} failed when it was called, without arguments, at the start: {text}") from error
    if instance is None or isinstance(instance, type) or inspect.isawaitable(instance):
        if inspect.iscoroutine(instance):
            instance.close()
        raise ValueError(f"{called} returned {instance!r}; it must return a new environment, and not be async")
    return instance


def inspect_factory(instance: Any, factory: Callable[[], Any], name: str | None) -> EnvSpec:
    """What is to be known of a factory, by its first instance.

    ValueError or TypeError for a class without `reset`, and for public methods that cannot be tools.
    """
    made = type(instance)
    reset = getattr(instance, "reset", None)
    if not callable(reset):
        raise ValueError(
            f"{_called(name)} made a {made.__name__}, which has no method 'reset'. It is called before each rollout "
            "with the row's columns: write 'def reset(self, **kwargs)', which returns None or a first observation"
        )
    tools = [_make_method_tool(instance, method) for method in public_methods(made)]
    has_reward = callable(getattr(instance, "get_reward", None))
    return EnvSpec(name or made.__name__, factory, made, tools, _columns(reset), has_reward, chosen=name is not None)


def public_methods(made: type) -> list[str]:
    """Names of the functions that a class and its bases define for the model, base classes first."""
    found: dict[str, bool] = {}
    for base in reversed(made.__mro__[:-1]):
        for name, value in vars(base).items():
            # What a class holds besides functions (properties, classes, objects) is no tool; a subclass may hide one.
            found[name] = isinstance(
                value, (types.FunctionType, staticmethod, classmethod, functools._lru_cache_wrapper)
            )
    return [name for name, is_function in found.items() if is_function and name[0] != "_" and name not in NOT_TOOLS]


def copied(value: Any) -> Any:
    """A value whose containers are copies, all the way down; what they hold (images) is shared."""
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return copy.copy(value) if isinstance(value, (set, np.ndarray)) else value


def _called(name: str | None) -> str:
    return "environment_factory" if name is None else f"environment_factory[{name!r}]"


def _make_method_tool(instance: Any, name: str) -> Tool:
    where = f"the environment method '{type(instance).__name__}.{name}'"
    try:
        return make_tool(getattr(instance, name), name, where)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{error}\nThe public methods of an environment are the model's tools; if this one is not, let its name "
            f"begin with an underscore"
        ) from error


def _columns(reset: Callable[..., Any]) -> frozenset[str] | None:
    """Names that `reset` takes; None if it takes any, or does not say."""
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
