"""Rewards for length and repetition, under the name of TRL's module."""

from __future__ import annotations

from groupgrad.rewards.shaping import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
)

__all__ = ["get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"]
