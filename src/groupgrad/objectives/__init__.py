"""The objective: pure functions from records to advantages, losses and metrics. No config, no collectives."""

from __future__ import annotations

from groupgrad.objectives.advantages import (
    Advantages,
    Aggregation,
    ScaleRewards,
    compute_advantages,
    reward_metrics,
)
from groupgrad.objectives.entropy import applied_entropy_coef, entropy_threshold, next_entropy_coef
from groupgrad.objectives.mismatch import mismatch_metrics
from groupgrad.objectives.options import LossType, MismatchMode, MismatchOptions, PolicyOptions, RatioLevel
from groupgrad.objectives.policy import LOSSES, PolicyLoss, policy_loss

__all__ = [
    "LOSSES",
    "Advantages",
    "Aggregation",
    "LossType",
    "MismatchMode",
    "MismatchOptions",
    "PolicyLoss",
    "PolicyOptions",
    "RatioLevel",
    "ScaleRewards",
    "applied_entropy_coef",
    "compute_advantages",
    "entropy_threshold",
    "mismatch_metrics",
    "next_entropy_coef",
    "policy_loss",
    "reward_metrics",
]
