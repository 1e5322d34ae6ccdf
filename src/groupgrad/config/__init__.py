"""The flat configuration that users fill in, the rules that it must obey, and what older scripts still set."""

from __future__ import annotations

from groupgrad.config.grpo_config import GRPOConfig

__all__ = ["GRPOConfig"]
