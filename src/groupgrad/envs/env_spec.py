"""Specifications of environments: the properties of a factory, found by inspecting its first instance."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from groupgrad.data.values import copy_containers
from groupgrad.envs.tools import Tool, error_text, make_tool

ENV_COLUMN = "environment"
"""Column of the data set that names a row's environment, where there are several."""

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods that only the trainer calls."""


class EnvironmentFault(ValueError):
    """An environment cannot be used; the message is complete without a prefix."""


@dataclass(slots=True)
class EnvSpec:
    """One factory and the properties of the environments that it makes."""

    name: str
    """The key in the dict of factories; of a single factory, the class's name."""
    factory: Callable[[], Any]
    env_class: type
    tools: list[Tool]
    """Public methods that the model may call."""
    reset_names: frozenset[str]
    """Columns of the data set that the signature of `reset` names."""
    reset_takes_all: bool
    """True if `reset` has `**kwargs` and so takes all columns."""
    has_reward: bool
    reward_takes_turns: bool
    """True if `get_reward` has an argument `num_turns`."""
    has_close: bool
    """True if instances can release what they hold, so that each may serve a single rollout."""
    is_chosen_by_column: bool
    """True if rows choose it by their column `environment`, which is then not passed to `reset`."""
    pool: list[Any]
    """Instances that no rollout uses."""
    reward_name: str = ""
    """Name of the column of its own reward: the class's name, numbered if several classes share it."""

    def reset_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for `reset`: copies of the row's columns that it takes."""
        return {
            name: copy_containers(value)
            for name, value in row.items()
            if (self.reset_takes_all or name in self.reset_names)
            and not (self.is_chosen_by_column and name == ENV_COLUMN)
        }


def first_instance(factory: Any, name: str | None) -> Any:
    """Calls a factory for the first time. ValueError if it fails."""
    try:
        return factory()
    except Exception as error:
        raise ValueError(
            f"{_argument(name)} failed when it was called, without arguments, at the start: {error_text(error)}; give "
            "a class, or a function that makes one"
        ) from error


def inspect_factory(instance: Any, factory: Callable[[], Any], name: str | None) -> EnvSpec:
    """The specification of a factory, from its first instance.

    ValueError or TypeError for a class without `reset`, and for public methods that cannot be tools.
    """
    env_class = type(instance)
    reset = getattr(instance, "reset", None)
    if not callable(reset):
        raise ValueError(
            f"{_argument(name)} made a {env_class.__name__}, which has no method 'reset'. It is called before each "
            "rollout with the row's columns: write 'def reset(self, **kwargs)', which returns None or a first "
            "observation"
        )
    names, takes_all = _columns(reset)
    return EnvSpec(
        name=name or env_class.__name__,
        factory=factory,
        env_class=env_class,
        tools=[_make_method_tool(instance, method) for method in public_methods(env_class)],
        reset_names=names,
        reset_takes_all=takes_all,
        has_reward=callable(getattr(instance, "get_reward", None)),
        reward_takes_turns="num_turns" in _columns(getattr(instance, "get_reward", lambda: None))[0],
        has_close=callable(getattr(instance, "close", None)),
        is_chosen_by_column=name is not None,
        pool=[instance],
    )


def public_methods(env_class: type) -> list[str]:
    """Names of the functions that a class and its bases define for the model, base classes first."""
    is_function: dict[str, bool] = {}
    for base in reversed(env_class.__mro__[:-1]):
        for name, value in vars(base).items():
            # Other attributes (properties, classes, objects) are no tools; a subclass may hide a tool with one.
            is_function[name] = isinstance(
                value, (types.FunctionType, staticmethod, classmethod, functools._lru_cache_wrapper)
            )
    return [name for name, is_tool in is_function.items() if is_tool and name[0] != "_" and name not in NOT_TOOLS]


def _argument(name: str | None) -> str:
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


def _columns(reset: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Names of the arguments of `reset`, and whether it takes any others too."""
    parameters = inspect.signature(reset).parameters.values()
    names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)
