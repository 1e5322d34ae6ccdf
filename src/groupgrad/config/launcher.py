"""DeepSpeed settings that come from the configuration or from the launcher."""

from __future__ import annotations

import os

from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import TrainingArguments

from groupgrad.compat import env_flag


def uses_deepspeed(config: TrainingArguments) -> bool:
    """True if the config or the launcher turns DeepSpeed on."""
    return config.deepspeed is not None or env_flag("ACCELERATE_USE_DEEPSPEED")


def zero_stage(config: TrainingArguments) -> int | None:
    """DeepSpeed ZeRO stage of the config or the launcher; None without DeepSpeed or if it cannot be read."""
    if not uses_deepspeed(config):
        return None
    deepspeed = config.deepspeed
    if deepspeed is None:
        deepspeed = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if not os.path.isfile(deepspeed):
            return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    try:
        return HfDeepSpeedConfig(deepspeed).get_value("zero_optimization.stage", 0)
    except (ValueError, AttributeError):
        return None
