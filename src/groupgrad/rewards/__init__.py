"""Built-in reward functions, and `RewardRunner`, which calls reward functions and models on finished rollouts.

Importing this package does not import torch or transformers; only `RewardRunner` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from groupgrad.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
from groupgrad.rewards.shaping import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
)
from groupgrad.rewards.think_format import think_format_reward

if TYPE_CHECKING:
    from groupgrad.rewards.reward_runner import RewardRunner

__all__ = [
    "REWARD_FUNCTIONS",
    "RewardRunner",
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]

REWARD_FUNCTIONS: dict[str, Callable[..., list[float | None]]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
    "get_cosine_scaled_reward": get_cosine_scaled_reward(max_len=1280),
    "get_repetition_penalty_reward": get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0),
}
"""Reward functions by their command-line name; a factory's name stands for its function with the arguments here."""


def __getattr__(name: str) -> Any:
    if name == "RewardRunner":
        from groupgrad.rewards.reward_runner import RewardRunner

        return RewardRunner
    raise AttributeError(f"module 'groupgrad.rewards' has no attribute {name!r}")
