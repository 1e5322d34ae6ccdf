"""liger-kernel's layers in the policy: where they can run, and the ones that are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations import liger

from groupgrad import compat
from groupgrad.errors import ConfigError
from groupgrad.models.unwrapping import base_model

WITHOUT_TRITON = ("cpu", "mps")
"""Device types without Triton."""

NO_LABELS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Kernels of a loss on labels, which GRPO does not have; without them the model keeps its own forward method."""


def check_liger(device: torch.device) -> None:
    """ConfigError if the kernels cannot run on `device`, ImportError if liger-kernel is not installed."""
    if device.type in WITHOUT_TRITON:
        raise ConfigError(
            [
                f"use_liger_kernel=True, but this run is on the device '{device.type}', where Liger's kernels, written "
                "in Triton, do not run. Set use_liger_kernel=False, or train on a GPU"
            ]
        )
    compat.require("liger-kernel", "use_liger_kernel=True")


def kernel_config(user_config: dict[str, bool] | None) -> dict[str, bool]:
    """Liger's kernel switches: all kernels but those of `NO_LABELS`, unless the user's config differs."""
    return {**NO_LABELS, **(user_config or {})}


def apply_kernels(model: nn.Module, user_config: dict[str, bool] | None) -> None:
    """Replaces the layers of `model`, under its adapter, by liger-kernel's.

    ConfigError for a model type without kernels, which the library itself ignores silently.
    """
    model_type = getattr(getattr(base_model(model), "config", None), "model_type", None)
    supported = _supported_model_types()
    if supported is not None and model_type not in supported:
        version = compat.installed_version("liger-kernel")
        raise ConfigError(
            [
                f"use_liger_kernel=True, but liger-kernel {version} has no kernels for the model type {model_type!r}. "
                "Set use_liger_kernel=False, or install a later liger-kernel"
            ]
        )
    liger.apply_liger_kernel(model, kernel_config(user_config))


@contextmanager
def configured_kernels(args: Any) -> Iterator[None]:
    """Inside, `transformers.Trainer` applies the same kernels when it applies them again at the start of training."""
    if not args.use_liger_kernel:
        yield
        return
    user_config = args.liger_kernel_config
    args.liger_kernel_config = kernel_config(user_config)
    try:
        yield
    finally:
        args.liger_kernel_config = user_config


def _supported_model_types() -> frozenset[str] | None:
    """Model types with kernels in the installed liger-kernel; None if it has no such list."""
    try:
        from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
            MODEL_TYPE_TO_APPLY_LIGER_FN,
        )
    except ImportError:
        return None
    return frozenset(MODEL_TYPE_TO_APPLY_LIGER_FN)
