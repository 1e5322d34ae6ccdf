"""DeepSpeed settings that come from the configuration or from the launcher."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainingArguments

from groupgrad.compat import env_flag


def uses_deepspeed(config: TrainingArguments) -> bool:
    """True if the config or the launcher turns DeepSpeed on."""
    return config.deepspeed is not None or env_flag("ACCELERATE_USE_DEEPSPEED")


def zero_stage(config: TrainingArguments) -> int | None:
    """DeepSpeed ZeRO stage of the config or the launcher; None without DeepSpeed or if it cannot be read."""
    if config.deepspeed is not None:
        return _stage(config.deepspeed)
    if not uses_deepspeed(config):
        return None
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    return _stage(path) if os.path.isfile(path) else int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))


def _stage(deepspeed: Any) -> int | None:
    """Reads the stage in a DeepSpeed configuration, a dict or the path of a file; 0 if it names none."""
    if isinstance(deepspeed, str) and os.path.isfile(deepspeed):
        import yaml

        with open(deepspeed, encoding="utf-8") as file:
            deepspeed = yaml.safe_load(file)
    if not isinstance(deepspeed, dict):
        return None
    zero = deepspeed.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    return stage if isinstance(stage, int) else None
