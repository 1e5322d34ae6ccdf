"""What the launcher and its configuration files ask for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupgrad.config.grpo_config import GRPOConfig


def zero_stage(config: GRPOConfig) -> int | None:
    """DeepSpeed ZeRO stage that the config or the launcher asks for; None without DeepSpeed or if it cannot be read."""
    if config.deepspeed is not None:
        return _stage(config.deepspeed)
    if env_on("ACCELERATE_USE_DEEPSPEED"):
        path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if os.path.isfile(path):
            return _stage(path)
        return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    return None


def _stage(settings: Any) -> int | None:
    """The stage in a DeepSpeed configuration, a dict or the path of a file; 0 if it has none."""
    if isinstance(settings, str) and os.path.isfile(settings):
        import yaml

        with open(settings, encoding="utf-8") as file:
            settings = yaml.safe_load(file)
    if not isinstance(settings, dict):
        return None
    zero = settings.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    return stage if isinstance(stage, int) else None


def uses_deepspeed(config: GRPOConfig) -> bool:
    """True if the config or the launcher asks for DeepSpeed."""
    return config.deepspeed is not None or env_on("ACCELERATE_USE_DEEPSPEED")


def zero_3_problem(c: GRPOConfig) -> str | None:
    """What of the config cannot be used with DeepSpeed ZeRO-3, in words; None without it."""
    if zero_stage(c) != 3:
        return None
    if not (c.ds3_gather_for_generation or c.use_vllm):
        return (
            "ds3_gather_for_generation=False with DeepSpeed ZeRO-3: sampling in this process needs whole weights. Set "
            "it to True, or use_vllm to True where they do not fit on one device"
        )
    for name in ("cast_lm_head_to_fp32", "sync_ref_model"):
        if getattr(c, name):
            return f"{name}=True does not go with DeepSpeed ZeRO-3. Set it to False, or use ZeRO stage 1 or 2"
    return None


def env_on(name: str) -> bool:
    """True if the environment variable says so."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes")
