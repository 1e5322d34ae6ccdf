"""Runs linear layers by oneDNN during sampling, on CPUs where our own kernels cannot be compiled.

For the few rows of a decode step `nn.functional.linear` repacks the whole weight at every call. oneDNN's product reads
the weight in place, and sums in another order. It is faster still with a copy of the weight in oneDNN's own layout,
which lasts for one session.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from groupgrad.scoring.fused_modules import is_replaced


@contextmanager
def fast_linears(model: nn.Module, *, pack: bool = False) -> Iterator[None]:
    """Runs the plain float32 linear layers of `model` on a CPU by oneDNN, without gradients.

    Layers with a replaced forward method are left alone. With `pack` weights are copied into oneDNN's layout and must
    not change inside.
    """
    is_available = _kernel is not None and torch.backends.mkldnn.enabled and not torch.is_autocast_enabled("cpu")
    modules: list[Any] = [module for module in model.modules() if is_available and _is_supported(module)]
    try:
        for module in modules:
            module.forward = partial(_forward, module, _pack(module.weight) if pack else module.weight)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _forward(module: nn.Linear, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    if input.dtype != torch.float32:
        return F.linear(input, module.weight, module.bias)
    return _kernel(input, weight, module.bias, "none", [], "")


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def _is_supported(module: nn.Module) -> bool:
    # A replaced forward method (offloading hooks, quantisation) has to be called.
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight = module.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


def is_plain_memory(parameter: torch.Tensor) -> bool:
    """True if the values can be read from the parameter's address; sharded and quantised weights have other classes."""
    return type(parameter) is nn.Parameter and parameter.is_contiguous()


def is_plain(module: Any) -> bool:
    """True for a plain linear layer, whose `forward` nothing but groupgrad may have replaced."""
    forward = module.__dict__.get("forward")
    is_unchanged = forward is None or getattr(forward, "func", None) is _forward or is_replaced(module)
    return (
        type(module) is nn.Linear and is_unchanged and module.weight.shape == (module.out_features, module.in_features)
    )


def _find_kernel() -> Any:
    """oneDNN's linear layer; None if this build of torch lacks it or it computes something else."""
    try:
        kernel = torch.ops.mkldnn._linear_pointwise.default
        generator = torch.Generator().manual_seed(0)
        inputs, weight, bias = (torch.rand(shape, generator=generator) for shape in ((1, 3, 8), (5, 8), (5,)))
        for b in (bias, None):
            expected = F.linear(inputs, weight, b)
            for w in (weight, _pack(weight)):
                if not torch.allclose(kernel(inputs, w, b, "none", [], ""), expected, rtol=1e-5, atol=1e-5):
                    return None
    except Exception:  # builds without oneDNN raise different errors
        return None
    return kernel


_kernel = _find_kernel()
