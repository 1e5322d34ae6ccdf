"""The objective: pure functions from records to advantages, losses and metrics. No config, no collectives."""

from __future__ import annotations

from groupgrad.objectives.advantages import Advantages, Aggregation, ScaleRewards, compute_advantages, reward_metrics
from groupgrad.objectives.entropy import applied_entropy_coef, entropy_threshold, next_entropy_coef
from groupgrad.objectives.liveness import Freshness, fresh_rows, known_rows, live_rows, passes_needed
from groupgrad.objectives.mismatch import FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS, logp_mismatch, mismatch_metrics
from groupgrad.objectives.options import LossType, MismatchMode, MismatchOptions, PolicyOptions, RatioLevel
from groupgrad.objectives.policy import LOSSES, PolicyLoss, policy_loss

__all__ = [
    "FRAC_DROPPED_ROWS",
    "FRAC_DROPPED_TOKENS",
    "LOSSES",
    "Advantages",
    "Aggregation",
    "Freshness",
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
    "fresh_rows",
    "known_rows",
    "live_rows",
    "logp_mismatch",
    "mismatch_metrics",
    "next_entropy_coef",
    "passes_needed",
    "policy_loss",
    "reward_metrics",
]
