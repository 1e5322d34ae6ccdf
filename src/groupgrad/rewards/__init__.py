"""Built-in reward functions. Importing this package does not import torch or transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupgrad.integrations.code_sandbox.code_reward import code_reward
from groupgrad.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
from groupgrad.rewards.judge import judge
from groupgrad.rewards.shaping import (
    get_cosine_scaled_reward,
    get_length_penalized_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)

__all__ = [
    "REWARD_FUNCTIONS",
    "accuracy_reward",
    "code_reward",
    "get_cosine_scaled_reward",
    "get_length_penalized_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "judge",
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
    "get_length_penalized_reward": get_length_penalized_reward(accuracy_reward),
}
"""Reward functions by their command-line name; a factory's name stands for its function with the arguments here."""


def __getattr__(name: str) -> Any:
    if name != "code_reward":
        raise AttributeError(f"module 'groupgrad.rewards' has no attribute {name!r}")
    from groupgrad.integrations.code_sandbox.code_reward import code_reward  # which imports this package

    return code_reward
