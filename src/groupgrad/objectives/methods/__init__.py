"""The losses: one file for each, whose `METHOD` the file's name stands for as `loss_type`.

A module elsewhere with a `METHOD` is a loss too: its path is its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from groupgrad.objectives.method import Method
from groupgrad.objectives.registry import registry_of

_REGISTRY = registry_of(__name__, __path__, "loss_type", "METHOD", Method)
LOSSES: Mapping[str, Method] = _REGISTRY.known
"""`loss_type` -> its definition."""
find_method = _REGISTRY.find
"""The loss of a name: a key of the mapping above, or the path of a module with `METHOD`. Else ValueError."""
