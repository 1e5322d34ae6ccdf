"""The losses: one file for each, whose `METHOD` the file's name stands for as `loss_type`.

A module elsewhere with a `METHOD` is a loss too: its path is its name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from groupgrad.objectives.method import Method
from groupgrad.objectives.registry import registry_of

_REGISTRY = registry_of(__name__, __path__, "loss_type", "METHOD", Method)
LOSSES: Mapping[str, Method] = _REGISTRY.known
"""`loss_type` -> its definition."""


@functools.cache
def find_method(name: str) -> Method:
    """The loss of this name: one of `LOSSES`, or the `METHOD` of a module whose path it is.

    ValueError, with what to set, for an unknown name, and for a module that cannot be imported or has no `METHOD`.
    """
    return _REGISTRY.find(name)
