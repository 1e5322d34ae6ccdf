"""Rewards for accuracy, under the name of TRL's module."""

from __future__ import annotations

from groupgrad.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward

__all__ = ["accuracy_reward", "reasoning_accuracy_reward"]
