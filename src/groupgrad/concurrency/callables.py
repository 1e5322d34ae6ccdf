"""Names of users' functions, and the test for async ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def function_name(function: Callable[..., Any]) -> str:
    """A callable's name for metrics: its `__name__`, or its class's name. Partials have the name of their function."""
    function = innermost(function)
    return str(getattr(function, "__name__", None) or type(function).__name__)


def is_async(function: Callable[..., Any]) -> bool:
    """True for a coroutine function, an object with an async `__call__`, and a partial of either."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(innermost(function)).__call__)


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The callable inside any layers of `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function
