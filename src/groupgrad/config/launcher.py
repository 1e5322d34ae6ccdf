"""Settings of DeepSpeed and FSDP that come from the configuration or from the launcher."""

from __future__ import annotations

import os
from typing import Any

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


def uses_fsdp(config: TrainingArguments) -> bool:
    """True if the config or the launcher turns FSDP on."""
    return bool(config.fsdp) or env_flag("ACCELERATE_USE_FSDP")


def holds_parts(config: TrainingArguments) -> bool:
    """True if each rank holds a part of the model, so that ranks are in collectives whenever they compute with it."""
    return zero_stage(config) == 3 or uses_fsdp(config)


def fsdp_settings(config: TrainingArguments) -> dict[str, Any]:
    """The keys of `fsdp_config`, without a prefix `fsdp_`, from the config or else the launcher; {} without FSDP."""
    if config.fsdp:
        given = config.fsdp_config
        found = given if isinstance(given, dict) else {}
        return {str(key).removeprefix("fsdp_"): value for key, value in found.items()}
    if not uses_fsdp(config):
        return {}
    # The launcher fills in a version and a size, whatever the wrapping.
    found = {"version": "1"}
    found |= {key: os.environ[name] for name, key in _FSDP_VARIABLES.items() if os.environ.get(name)}
    if found.get("auto_wrap_policy") != "SIZE_BASED_WRAP":
        found.pop("min_num_params", None)
    return {key: _read(value) for key, value in found.items()}


def fsdp_layer_classes(config: TrainingArguments) -> tuple[str, ...]:
    """Class names of the modules that FSDP shards one by one; empty for the model's decoder layers."""
    names = fsdp_settings(config).get("transformer_layer_cls_to_wrap") or ()
    parts = names.split(",") if isinstance(names, str) else names
    return tuple(name.strip() for name in parts if name.strip())


def fsdp_offloads(config: TrainingArguments) -> bool:
    """True if FSDP keeps its shards in host memory; accelerate's configuration calls that `offload_params`."""
    settings = fsdp_settings(config)
    return bool(settings.get("cpu_offload") or settings.get("offload_params"))


_FSDP_VARIABLES = {
    "FSDP_VERSION": "version",
    "FSDP_RESHARD_AFTER_FORWARD": "reshard_after_forward",
    "FSDP_OFFLOAD_PARAMS": "cpu_offload",
    "FSDP_AUTO_WRAP_POLICY": "auto_wrap_policy",
    "FSDP_MIN_NUM_PARAMS": "min_num_params",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "transformer_layer_cls_to_wrap",
    "FSDP_ACTIVATION_CHECKPOINTING": "activation_checkpointing",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "activation_checkpointing_offload",
}
"""Variable of accelerate's launcher -> key of `fsdp_config`. Loading and file formats are the trainer's own."""


def _read(value: str) -> Any:
    text = value.strip()
    switch = {"true": True, "false": False}.get(text.lower())
    return switch if switch is not None else int(text) if text.isdigit() else text
