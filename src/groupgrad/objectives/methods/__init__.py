"""The losses: one file for each, whose `METHOD` the file's name stands for as `loss_type`.

A module elsewhere with a `METHOD` is a loss too: its path is its name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from groupgrad.objectives.method import Method
from groupgrad.spelling import did_you_mean

LOSSES: Mapping[str, Method] = {
    module.name: import_module(f"{__name__}.{module.name}").METHOD for module in iter_modules(__path__)
}
"""`loss_type` -> its definition."""


@functools.cache
def find_method(name: str) -> Method:
    """The loss of this name: one of `LOSSES`, or the `METHOD` of a module whose path it is.

    ValueError, with what to set, for an unknown name, and for a module that cannot be imported or has no `METHOD`.
    """
    if name in LOSSES:
        return LOSSES[name]
    if "." not in name:
        hint = did_you_mean(name, list(LOSSES), after=" ")
        raise ValueError(
            f"loss_type={name!r} is not known: {hint}Set it to one of {', '.join(LOSSES)}, or to the path of a module "
            "of yours, such as 'mypackage.mymethod'"
        )
    try:
        method = getattr(import_module(name), "METHOD", None)
    except Exception as error:  # a module's own code may raise anything
        raise ValueError(
            f"loss_type={name!r} cannot be imported ({type(error).__name__}: {error}). Set it to a module on the path"
        ) from error
    if not isinstance(method, Method):
        raise ValueError(f"loss_type={name!r} has no METHOD of type groupgrad.objectives.Method. Define one there")
    return method
