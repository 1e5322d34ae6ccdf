"""The advantage estimators: one file for each, whose `ESTIMATOR` the file's name stands for as `advantage_estimator`.

A module elsewhere with an `ESTIMATOR` is one too: its path is its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from groupgrad.objectives.estimator import Estimator
from groupgrad.objectives.registry import registry_of

_REGISTRY = registry_of(__name__, __path__, "advantage_estimator", "ESTIMATOR", Estimator)
ESTIMATORS: Mapping[str, Estimator] = _REGISTRY.known
"""`advantage_estimator` -> its definition."""
find_estimator = _REGISTRY.find
"""The estimator of a name: a key of the mapping above, or the path of a module with `ESTIMATOR`. Else ValueError."""
