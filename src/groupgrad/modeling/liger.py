"""liger-kernel's layers in the policy: when they can run, and which of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations import liger

from groupgrad import compat
from groupgrad.errors import ConfigError
from groupgrad.modeling.adapters import is_adapted

WITHOUT_TRITON = ("cpu", "mps")
"""Kinds of devices on which no kernel written in Triton runs."""

NO_LABELS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Kernels of a loss on labels, which GRPO has none of; without them the model keeps its own forward pass."""


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


def kernel_config(given: dict[str, bool] | None) -> dict[str, bool]:
    """Which kernels are used: all that a model has but those of `NO_LABELS`, unless `given` says otherwise."""
    return {**NO_LABELS, **(given or {})}


def apply_kernels(model: nn.Module, given: dict[str, bool] | None) -> None:
    """Exchange the layers of `model`, under its adapter, for liger-kernel's, forward and backward.

    ConfigError if there are none for this kind of model, of which the library itself says nothing.
    """
    inner: Any = model.get_base_model() if is_adapted(model) else model  # pyright: ignore[reportCallIssue]
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    known = _known_kinds()
    if known is not None and kind not in known:
        version = compat.installed_version("liger-kernel")
        raise ConfigError(
            [
                f"use_liger_kernel=True, but liger-kernel {version} has no kernels for the model type {kind!r}. Set "
                "use_liger_kernel=False, or install a later liger-kernel"
            ]
        )
    liger.apply_liger_kernel(model, kernel_config(given))


@contextmanager
def configured_kernels(args: Any) -> Iterator[None]:
    """`transformers.Trainer` puts the kernels in once more when training begins: inside it does so as we did."""
    if not args.use_liger_kernel:
        yield
        return
    given = args.liger_kernel_config
    args.liger_kernel_config = kernel_config(given)
    try:
        yield
    finally:
        args.liger_kernel_config = given


def _known_kinds() -> frozenset[str] | None:
    """Model types that the installed liger-kernel has kernels for; None if it does not say."""
    try:
        from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
            MODEL_TYPE_TO_APPLY_LIGER_FN,
        )
    except ImportError:
        return None
    return frozenset(MODEL_TYPE_TO_APPLY_LIGER_FN)
