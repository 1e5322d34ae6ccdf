"""Finds the ways to run that the rules of `GRPOConfig` refuse."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any

from groupgrad.apps.plan.memory import RunSizes
from groupgrad.config.rules import problems
from groupgrad.config.settings import GRPOSettings

_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}
"""Optimizers of the plan -> those of transformers with another name."""


def refusal(sizes: RunSizes) -> str | None:
    """The sentences of the rules that a way to run breaks; None if it breaks none.

    Rules that the run also breaks with the whole model on each device say nothing about the way, and are left out.
    """
    settings = {
        "optim": _OPTIMIZERS.get(sizes.optimizer, sizes.optimizer),
        **sizes.settings,
        "use_vllm": not sizes.samples or sizes.colocate is not None,
        "vllm_mode": "colocate" if sizes.colocate else "server",
        "output_dir": tempfile.gettempdir(),
    }
    alone = {"fsdp": None, "deepspeed": None, "context_parallel_size": 1}
    way = {**alone, "context_parallel_size": sizes.context_parallel_size}
    if sizes.only_sharding is not None:
        way |= {name: sizes.settings.get(name) for name in ("fsdp", "deepspeed")}
    elif sizes.sharding == "fsdp2":
        way["fsdp"] = True
    elif sizes.sharding != "ddp":
        way["deepspeed"] = {"zero_optimization": {"stage": int(sizes.sharding[-1])}}
    if way == alone:
        return None
    known = _broken({**settings, **alone}, sizes.devices)
    return ". ".join(text for text in _broken({**settings, **way}, sizes.devices) if text not in known) or None


def _broken(settings: Mapping[str, Any], processes: int) -> list[str]:
    """The sentences of the rules that these settings break on so many processes, without setting up a device."""
    kind = type("Planned", (GRPOSettings,), {"world_size": processes})
    config = object.__new__(kind)
    vars(config).update(_defaults())
    vars(config).update({name: value for name, value in settings.items() if name in _defaults()})
    return problems(config)


@cache
def _defaults() -> dict[str, Any]:
    """The settings of a run and their defaults."""
    missing = dataclasses.MISSING
    return {
        field.name: field.default if field.default_factory is missing else field.default_factory()
        for field in dataclasses.fields(GRPOSettings)
    }
