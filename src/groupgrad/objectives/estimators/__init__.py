"""The advantage estimators: one file for each, whose `ESTIMATOR` the file's name stands for as `advantage_estimator`.

A module elsewhere with an `ESTIMATOR` is one too: its path is its name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from groupgrad.objectives.estimator import Estimator
from groupgrad.objectives.registry import registry_of

_REGISTRY = registry_of(__name__, __path__, "advantage_estimator", "ESTIMATOR", Estimator)
ESTIMATORS: Mapping[str, Estimator] = _REGISTRY.known
"""`advantage_estimator` -> its definition."""


@functools.cache
def find_estimator(name: str) -> Estimator:
    """The estimator of this name: one of `ESTIMATORS`, or the `ESTIMATOR` of a module whose path it is.

    ValueError, with what to set, for an unknown name, and for a module that cannot be imported or has no `ESTIMATOR`.
    """
    return _REGISTRY.find(name)
