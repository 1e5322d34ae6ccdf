"""What the launcher and its configuration files ask for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupgrad.config.grpo_config import GRPOConfig


def zero_stage(config: GRPOConfig) -> int | None:
    """DeepSpeed ZeRO stage that the config or the launcher asks for; None without DeepSpeed or if it cannot be read."""
    settings: Any = config.deepspeed
    if isinstance(settings, str) and os.path.isfile(settings):
        import yaml

        with open(settings, encoding="utf-8") as file:
            settings = yaml.safe_load(file)
    if isinstance(settings, dict):
        zero = settings.get("zero_optimization")
        stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
        return stage if isinstance(stage, int) else None
    if env_on("ACCELERATE_USE_DEEPSPEED"):
        return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    return None


def env_on(name: str) -> bool:
    """True if the environment variable says so."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes")
