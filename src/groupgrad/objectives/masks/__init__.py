"""The off-policy masks: one file for each, whose `MASK` the file's name stands for as `off_policy_mask`.

A module elsewhere with a `MASK` is one too: its path is its name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from groupgrad.objectives.mask import Mask
from groupgrad.objectives.registry import registry_of

_REGISTRY = registry_of(__name__, __path__, "off_policy_mask", "MASK", Mask)
MASKS: Mapping[str, Mask] = _REGISTRY.known
"""`off_policy_mask` -> its definition."""


@functools.cache
def find_mask(name: str) -> Mask:
    """The mask of this name: one of `MASKS`, or the `MASK` of a module whose path it is.

    ValueError, with what to set, for an unknown name, and for a module that cannot be imported or has no `MASK`.
    """
    return _REGISTRY.find(name)
