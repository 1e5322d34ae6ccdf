"""Reads what `groupgrad plan` prints."""

from __future__ import annotations

import re
from typing import Any

import yaml


def recommendation(shown: str) -> tuple[str, dict[str, Any]]:
    """The way that the line `Recommended: ...` names and the settings of a `GRPOConfig` in it, vLLM's included.

    The settings of an adapter are those of the way.
    """
    line = re.search(r"Recommended: (.*?), (\w+=.*)", shown)
    assert line is not None, shown
    name, told = line[1], re.sub(r"vLLM does not .*?one\.", "", line[2])
    settings = {key: yaml.safe_load(value) for key, value in re.findall(r"(\w+)=([^\s,]*[^\s,.])", told)}
    assert settings.pop("use_peft", False) == (name.partition(",")[0] == "LoRA")
    if "vllm_gpu_memory_utilization" in settings:
        settings |= {"use_vllm": True, "vllm_mode": "colocate"}
    return name, settings
