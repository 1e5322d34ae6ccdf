"""groupgrad: group relative policy optimization (GRPO) for language models.

`from groupgrad import GRPOTrainer, GRPOConfig` gives the trainer; `groupgrad.rewards` the built-in reward functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupgrad.config import GRPOConfig
    from groupgrad.trainer import GRPOTrainer

from groupgrad._version import __version__

__all__ = ["GRPOConfig", "GRPOTrainer", "__version__"]

_HOMES = {"GRPOConfig": "groupgrad.config", "GRPOTrainer": "groupgrad.trainer"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'groupgrad' has no attribute {name!r}")
