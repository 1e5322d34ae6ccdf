"""The objective: pure functions from records to advantages, losses and metrics. No config, no collectives."""

from __future__ import annotations

from groupgrad.batch import Batch, StepTotals, TokenScores, offsets_of, rows_of
from groupgrad.objectives.advantages import Advantages, compute_advantages, reward_metrics, reward_spread
from groupgrad.objectives.entropy import applied_entropy_coef, entropy_threshold, next_entropy_coef
from groupgrad.objectives.estimator import (
    AdvantageOptions,
    Aggregation,
    Estimate,
    Estimator,
    ScaleRewards,
    ScoredGroups,
    ScoredTurns,
)
from groupgrad.objectives.estimators import ESTIMATORS, find_estimator
from groupgrad.objectives.mask import Mask
from groupgrad.objectives.masks import MASKS, find_mask
from groupgrad.objectives.method import Method, PolicyTerms, StepTokens, TokenLoss, sampler_logprobs
from groupgrad.objectives.methods import LOSSES, find_method
from groupgrad.objectives.mismatch import FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS, logp_mismatch, mismatch_metrics
from groupgrad.objectives.nonfinite import NonFiniteToken, TokenTerms, nonfinite_tokens
from groupgrad.objectives.options import MismatchMode, MismatchOptions, PolicyOptions, RatioLevel
from groupgrad.objectives.policy import PolicyLoss, policy_loss
from groupgrad.objectives.ragged import PerRow, PerToken
from groupgrad.objectives.registry import MORE_THAN_0, Range, described_settings, setting
from groupgrad.objectives.required_passes import (
    FORWARD,
    FORWARD_AND_BACKWARD,
    NO_PASS,
    OnPolicyInfo,
    fresh_rows,
    known_rows,
    live_rows,
    required_passes,
    sampler_scores,
)
from groupgrad.objectives.terms import drift

__all__ = [
    "ESTIMATORS",
    "FORWARD",
    "FORWARD_AND_BACKWARD",
    "FRAC_DROPPED_ROWS",
    "FRAC_DROPPED_TOKENS",
    "LOSSES",
    "MASKS",
    "MORE_THAN_0",
    "NO_PASS",
    "AdvantageOptions",
    "Advantages",
    "Aggregation",
    "Batch",
    "Estimate",
    "Estimator",
    "Mask",
    "Method",
    "MismatchMode",
    "MismatchOptions",
    "NonFiniteToken",
    "OnPolicyInfo",
    "PerRow",
    "PerToken",
    "PolicyLoss",
    "PolicyOptions",
    "PolicyTerms",
    "Range",
    "RatioLevel",
    "ScaleRewards",
    "ScoredGroups",
    "ScoredTurns",
    "StepTokens",
    "StepTotals",
    "TokenLoss",
    "TokenScores",
    "TokenTerms",
    "applied_entropy_coef",
    "compute_advantages",
    "described_settings",
    "drift",
    "entropy_threshold",
    "find_estimator",
    "find_mask",
    "find_method",
    "fresh_rows",
    "known_rows",
    "live_rows",
    "logp_mismatch",
    "mismatch_metrics",
    "next_entropy_coef",
    "nonfinite_tokens",
    "offsets_of",
    "policy_loss",
    "required_passes",
    "reward_metrics",
    "reward_spread",
    "rows_of",
    "sampler_logprobs",
    "sampler_scores",
    "setting",
]
