"""Models with quantized weights (bitsandbytes): their detection, and their preparation for training."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

_PACKED = ("Params4bit", "Int8Params")


def is_quantized(model: Any) -> bool:
    """True for a model, with or without an adapter, whose weights were loaded in fewer bits (bitsandbytes, others)."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return bool(getattr(inner, "is_quantized", False)) or getattr(inner, "quantization_method", None) is not None


def quantization_settings(model: Any) -> dict[str, Any] | None:
    """The settings by which the model's weights were quantized when they were loaded; None if they were not."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    settings: Any = getattr(inner.config, "quantization_config", None)
    return settings.to_dict() if hasattr(settings, "to_dict") else settings


def is_packed(parameter: torch.Tensor) -> bool:
    """True for the packed weight of a quantized layer, whatever dtype it is stored as."""
    return not parameter.is_floating_point() or type(parameter).__name__ in _PACKED


def rounds_to_int8(model: nn.Module) -> bool:
    """True if layers round their inputs to 8 bits (LLM.int8), so that a row's log-probs depend on its batch."""
    return any(_is_int8(module) and module.weight.device.type != "cpu" for module in model.modules())


def _is_int8(module: Any) -> bool:
    return type(module).__name__ == "Linear8bitLt"


def make_trainable_on_cpu(model: nn.Module) -> None:
    """Makes quantized layers (bitsandbytes 0.50) on a CPU compute the same in evaluation mode as in training.

    The first call of a 4-bit layer in evaluation mode repacks its weights and rounds their scales for good (processors
    with AVX512-BF16); no gradient passes through it afterwards. An 8-bit layer rounds its inputs in evaluation mode
    alone. ValueError for a model whose weights have been repacked.
    """
    for name, module in model.named_modules():
        if _is_int8(module) and module.weight.device.type == "cpu":
            module.training, module.train = True, partial(_ignore_mode, module)  # pyright: ignore
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"the 4-bit weights of {name} were rearranged for inference on this CPU when the model was first "
                "called, and no gradient passes through them since; load the model anew and pass it before it is used"
            )
        vars(module)["support_avx512bf16_for_cpu"] = False


def _ignore_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
