"""The trainer: `GRPOTrainer` and what joins it to `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

from groupgrad import trl_paths
from groupgrad.trainer.trainer import GRPOTrainer

__all__ = ["GRPOTrainer"]


def __getattr__(name: str) -> Any:
    return trl_paths.find(name, "trainer")
