"""The flat configuration of a run, the rules it must obey, and fields of earlier releases."""

from __future__ import annotations

from groupgrad.config.grpo_config import GRPOConfig, option_values

__all__ = ["GRPOConfig", "option_values"]
