"""Faster kernels for linear layers on CPUs where our own cannot be compiled, while nothing is trained.

For the few rows of a decode step the general matrix product behind `nn.functional.linear` packs the whole weight anew
each time; oneDNN's reads it as it lies. It is the same sum over the same weights, in another order. It is faster with a
copy of the weight in the order in which it wants it, made for one call of `sample` and dropped with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from groupgrad.modeling.fused_modules import is_replaced


@contextmanager
def fast_linears(model: nn.Module, *, pack: bool = False) -> Iterator[None]:
    """Plain float32 linear layers of `model` that lie on a CPU run by oneDNN, unless they have been replaced already;
    gradients do not flow there.

    With `pack` the weights are copied into the kernel's own order; inside, they must not change.
    """
    chosen: list[Any] = [module for module in model.modules() if _fits(module)] if _is_available() else []
    try:
        for module in chosen:
            module.forward = partial(_forward, module, _pack(module.weight) if pack else module.weight)
        yield
    finally:
        for module in chosen:
            module.__dict__.pop("forward", None)


def _forward(module: nn.Linear, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    if input.dtype != torch.float32:
        return F.linear(input, module.weight, module.bias)
    return _kernel(input, weight, module.bias, "none", [], "")


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def _fits(module: nn.Module) -> bool:
    # Whoever replaced a layer's forward method (offloading hooks, quantisation) wants to be asked.
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight = module.weight
    if isinstance(weight, nn.UninitializedParameter):
        return False
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


def lies_plainly(parameter: torch.Tensor) -> bool:
    """True if its numbers can be read from its address on: shards and quantised weights bring a class of their own."""
    return type(parameter) is nn.Parameter and parameter.is_contiguous()


def is_plain(module: Any) -> bool:
    """True if the module computes a linear layer and nothing else, for all that can be seen."""
    forward = module.__dict__.get("forward")
    is_unchanged = forward is None or getattr(forward, "func", None) is _forward or is_replaced(module)
    return (
        type(module) is nn.Linear and is_unchanged and module.weight.shape == (module.out_features, module.in_features)
    )


def _is_available() -> bool:
    return _kernel is not None and torch.backends.mkldnn.enabled and not torch.is_autocast_enabled("cpu")


def _find_kernel() -> Any:
    """oneDNN's linear layer, if this build of torch has it and it computes what it should."""
    try:
        kernel = torch.ops.mkldnn._linear_pointwise.default
        draw = torch.Generator().manual_seed(0)
        inputs, weight, bias = (torch.rand(shape, generator=draw) for shape in ((1, 3, 8), (5, 8), (5,)))
        for b in (bias, None):
            expected = F.linear(inputs, weight, b)
            for w in (weight, _pack(weight)):
                if not torch.allclose(kernel(inputs, w, b, "none", [], ""), expected, rtol=1e-5, atol=1e-5):
                    return None
    except Exception:  # whatever a build without oneDNN says to it
        return None
    return kernel


_kernel = _find_kernel()
