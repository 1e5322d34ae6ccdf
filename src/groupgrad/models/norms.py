"""RMS norms of training passes on a CPU, computed in float64 and with a backward pass of their own.

The factor of a norm scales all numbers of a vector together, so its rounding does not average out in the products that
follow. The backward pass as one function goes over memory fewer times than the one that autograd puts together, which
makes up for the float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from groupgrad.models.attention import is_checkpointing
from groupgrad.models.sharded import is_sharded

_KINDS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
"""Of transformers, which compute weight * (x / sqrt(mean(x^2) + epsilon)) in this very form."""


@contextmanager
def fine_norms(model: nn.Module) -> Iterator[None]:
    """The float32 RMS norms on CPUs of known kinds inside `model` in float64, as long as this lasts.

    With gradient checkpointing they stay so until `own_norms`: layers are computed again when this is long over.
    Sharded and compiled models are left as they are, and norms that somebody else has replaced. Gradients of gradients
    do not flow through them.
    """
    replaced = [] if is_sharded(model) or _is_compiled(model) else [m for m in model.modules() if _is_known(m)]
    stays = torch.is_grad_enabled() and is_checkpointing(model)
    for module in replaced:
        module.forward = partial(_normalise, module, stays)
    try:
        yield
    finally:
        for module in [] if stays else replaced:
            module.__dict__.pop("forward", None)


def own_norms(model: nn.Module) -> None:
    """Give the norms inside `model` back what their classes compute."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "func", None) is _normalise:
            del module.forward


def _is_compiled(model: nn.Module) -> bool:
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def _is_known(module: nn.Module) -> bool:
    kind = type(module)
    if kind.__name__ not in _KINDS or not kind.__module__.startswith("transformers.models."):
        return False
    weight = module._parameters.get("weight")
    is_plain = weight is not None and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_plain and "forward" not in module.__dict__ and kind.forward.__module__ == kind.__module__


def _normalise(module: Any, stays: bool, hidden_states: torch.Tensor) -> torch.Tensor:
    is_other = hidden_states.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
    # Somebody else's checkpointing: what is computed again later has to save the same tensors.
    if is_other or (not stays and _saves_in_another_way()):
        return type(module).forward(module, hidden_states)
    return _Norm.apply(hidden_states, module.weight, module.variance_epsilon)  # pyright: ignore[reportReturnType]


def _saves_in_another_way() -> bool:
    """True if what is saved for the backward pass goes through somebody's hooks."""
    find = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return find is not None and find(True) is not None


class _Norm(torch.autograd.Function):
    """weight * (x / sqrt(mean(x^2) + epsilon)) over the last dimension, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = x.double()
        lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = lengths.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, factor.float())
        return wide.mul_(factor).mul_(weight).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, factor = ctx.saved_tensors
        (grad,) = incoming
        normal = x * factor
        of_weight = (grad * normal).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        pull = grad * weight
        along = (pull * normal).mean(-1, keepdim=True)
        return pull.sub_(normal.mul_(along)).mul_(factor), of_weight, None
