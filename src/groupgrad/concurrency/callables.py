"""Inspects users' functions: their names, the keywords that partials have set, and whether they are async."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def function_name(function: Callable[..., Any]) -> str:
    """A callable's name for metrics: its `__name__`, or its class's name. Partials have the name of their function."""
    function = innermost(function)
    return str(getattr(function, "__name__", None) or type(function).__name__)


def qualified_name(function: Callable[..., Any]) -> str:
    """A callable's module and name within it, or those of its class. The script that runs is the module of its file."""
    function = innermost(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None) or ""
    if module in ("__main__", "__mp_main__"):
        code = getattr(inspect.unwrap(function), "__code__", None)
        file = getattr(sys.modules["__main__"], "__file__", None) if code is None else code.co_filename
        module = Path(file).stem if file is not None and Path(file).is_file() else "__main__"  # as in a notebook
    return f"{module}.{named.__qualname__}".lstrip(".")


def is_async(function: Callable[..., Any]) -> bool:
    """True for a coroutine function, an object with an async `__call__`, and a partial of either."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(innermost(function)).__call__)


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The callable inside any layers of `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def bound_keywords(function: Callable[..., Any]) -> set[str]:
    """The keywords that layers of `functools.partial` have set; `inspect.signature` does not say which they are."""
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        bound.update(function.keywords)
        function = function.func
    return bound
