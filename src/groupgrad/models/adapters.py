"""Adapters (PEFT) around a policy."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import nn


def is_adapted(model: Any) -> bool:
    """True for a model with a PEFT adapter."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def add_adapter(model: nn.Module, peft_config: Any) -> nn.Module:
    """`model` wrapped by the adapter that `peft_config` describes.

    ImportError without peft, TypeError if `peft_config` is something else, ValueError if the model has an adapter.
    """
    if importlib.util.find_spec("peft") is None:
        raise ImportError("peft_config is given, but peft is not installed: pip install groupgrad[peft]")
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(
            f"peft_config is a {type(peft_config).__name__}; it must be a peft.PeftConfig such as peft.LoraConfig(...)"
        )
    if is_adapted(model):
        raise ValueError(
            "the model already has an adapter and peft_config is given too; pass the PeftModel alone to go on training "
            "its adapter, or the base model with peft_config to start a new one"
        )
    return get_peft_model(model, peft_config)  # pyright: ignore[reportArgumentType, reportReturnType]
