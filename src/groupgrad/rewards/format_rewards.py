"""Rewards for the `<think>` format, under the name of TRL's module."""

from __future__ import annotations

from groupgrad.rewards.shaping import think_format_reward

__all__ = ["think_format_reward"]
