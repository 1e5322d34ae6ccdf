"""The off-policy masks: one file for each, whose `MASK` the file's name stands for as `off_policy_mask`.

A module elsewhere with a `MASK` is one too: its path is its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from groupgrad.objectives.mask import Mask
from groupgrad.objectives.registry import registry_of

_REGISTRY = registry_of(__name__, __path__, "off_policy_mask", "MASK", Mask)
MASKS: Mapping[str, Mask] = _REGISTRY.known
"""`off_policy_mask` -> its definition."""
find_mask = _REGISTRY.find
"""The mask of a name: a key of the mapping above, or the path of a module with `MASK`. Else ValueError."""
