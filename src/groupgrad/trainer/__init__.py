"""The trainer: `GRPOTrainer` and what joins it to `transformers.Trainer`."""

from groupgrad.trainer.trainer import GRPOTrainer

__all__ = ["GRPOTrainer"]
