"""What parts of known models compute in a pass: on a CPU exactly where it counts and as decode steps do, on a GPU in
few launches.

Linear layers, RMS norms and the gates of layers are computed by the compiled kernels (see `kernels`), which give a
token the same numbers when it is sampled and when it is trained. Norms are computed in float64: their factor scales
all numbers of a vector together, so its rounding does not average out in the products that follow. Their backward
passes go over memory fewer times than those that autograd puts together.

On a GPU PyTorch's fused RMS norm computes norms, rounding once too, in one launch; transformers' modules take one for
each of their operations, and keep the results of several for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from groupgrad import kernels
from groupgrad.kernels import layers as parts
from groupgrad.modeling.families import MLPS, NORMS, is_transformers_class
from groupgrad.modeling.scoring.attention import is_checkpointing
from groupgrad.modeling.systems.zero3 import is_sharded

_LINEAR = nn.Linear.forward

_OWN: tuple[type, ...] = (torch.Tensor, nn.Parameter)
"""Classes of tensors that are what they seem."""


@contextmanager
def compiled_parts(model: nn.Module, *, stays: bool | None = None) -> Iterator[None]:
    """As long as this lasts, parts of known kinds inside `model` are computed as the head of this file says.

    On CPUs those of float32, on GPUs norms of any type. Without compiled kernels norms alone are taken over on CPUs, in
    float64. With gradient checkpointing (or if `stays` says so) the parts stay so until `own_parts`: layers are
    computed again when this is long over. Sharded and compiled models are left as they are, and parts that somebody
    else has replaced. Gradients of gradients do not flow through what a CPU computes.
    """
    replaced: list[Any] = []
    if stays is None:
        stays = torch.is_grad_enabled() and is_checkpointing(model)
    try:
        if not is_sharded(model) and not _is_compiled(model):
            has_kernels = any(p.device.type == "cpu" for p in model.parameters()) and kernels.library() is not None
            for module in model.modules():
                compute = _replacement(module, has_kernels=has_kernels)
                if compute is not None:
                    replaced.append(module)
                    module.forward = _Replaced(module, compute, stays)
        yield
    finally:
        for module in [] if stays else replaced:
            module.__dict__.pop("forward", None)


def own_parts(model: nn.Module) -> None:
    """Give the parts inside `model` back what their classes compute."""
    for module in model.modules():
        if is_replaced(module):
            del module.forward


def is_replaced(module: nn.Module) -> bool:
    """True if `compiled_parts` has taken the module over."""
    return isinstance(module.__dict__.get("forward"), _Replaced)


def is_silu(activation: Any) -> bool:
    """True for a module that computes x * sigmoid(x) and that nobody watches."""
    return type(activation).__name__ in ("SiLU", "SiLUActivation") and not (
        activation._forward_hooks
        or activation._forward_pre_hooks
        or activation._backward_hooks
        or activation._backward_pre_hooks
        or "forward" in activation.__dict__
    )


class _Replaced:
    """Computes a part in place of its class, unless a tensor is of another kind or somebody watches what is saved."""

    def __init__(self, module: Any, compute: Callable[[Any, torch.Tensor], torch.Tensor | None], stays: bool):
        self._module, self._compute, self._stays = module, compute, stays

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        module, (hidden,) = self._module, (*inputs, *named.values())
        found = None
        # Somebody else's checkpointing: what is computed again later has to save the same tensors.
        is_watched = not self._stays and _saves_in_another_way()
        if not is_watched and not _has_tangents():
            found = self._compute(module, hidden)
        return type(module).forward(module, hidden) if found is None else found


def _replacement(module: nn.Module, *, has_kernels: bool) -> Callable[[Any, torch.Tensor], torch.Tensor | None] | None:
    """What computes a module's part, or None; it gives None for what it cannot compute."""
    if "forward" in module.__dict__:
        return None
    kind = type(module)
    if kind is nn.Linear:
        return _linear if has_kernels and nn.Linear.forward is _LINEAR and _is_plain(module.weight) else None
    if not is_transformers_class(kind) or kind.forward.__module__ != kind.__module__:
        return None
    if kind.__name__ in NORMS:
        weight: Any = module._parameters.get("weight")
        if type(weight) in _OWN and weight.is_cuda:
            return _fused_norm if weight.numel() else None
        return _normalise if _is_plain(weight) else None
    return _gate if has_kernels and kind.__name__ in MLPS and is_silu(module.act_fn) else None


def _is_plain(weight: Any) -> bool:
    """True for a float32 parameter on a CPU, in one piece, whose class is no other's."""
    return type(weight) is nn.Parameter and _is_plain_tensor(weight) and weight.numel() > 0 and weight.is_contiguous()


def _is_plain_tensor(tensor: Any) -> bool:
    return type(tensor) in _OWN and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _is_compiled(model: nn.Module) -> bool:
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def _saves_in_another_way() -> bool:
    """True if what is saved for the backward pass goes through somebody's hooks."""
    find = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return find is not None and find(True) is not None


def _has_tangents() -> bool:
    """True in forward-mode differentiation."""
    return forward_ad._current_level >= 0


def _in_float32(compute: Callable[[Any, torch.Tensor], torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """The computation for inputs that the kernels take."""

    def computed(module: Any, input: torch.Tensor) -> torch.Tensor | None:
        fits = _is_plain_tensor(input) and not torch.is_autocast_enabled("cpu")
        return compute(module, input) if fits else None

    return computed


@_in_float32
def _linear(module: nn.Linear, input: torch.Tensor) -> torch.Tensor | None:
    library, weight, bias = kernels.library(), module.weight, module.bias
    fits = (
        _is_plain_tensor(weight) and (bias is None or _is_plain_tensor(bias)) and input.shape[-1:] == weight.shape[1:]
    )
    return parts.linear(library, input, weight, bias) if library is not None and fits else None


@_in_float32
def _normalise(module: Any, input: torch.Tensor) -> torch.Tensor | None:
    library, weight = kernels.library(), module.weight
    if not _is_plain_tensor(weight) or input.shape[-1:] != weight.shape:
        return None
    if library is None:
        return _Norm.apply(input, weight, module.variance_epsilon)  # pyright: ignore[reportReturnType]
    return parts.norm(library, input, weight, module.variance_epsilon)


@_in_float32
def _gate(module: Any, input: torch.Tensor) -> torch.Tensor | None:
    library = kernels.library()
    if library is None or not is_silu(module.act_fn):
        return None
    gate, up = module.gate_proj(input), module.up_proj(input)
    if not (_is_plain_tensor(gate) and _is_plain_tensor(up) and gate.shape == up.shape):
        return module.down_proj(module.act_fn(gate) * up)
    return module.down_proj(parts.gated(library, gate, up))


def _fused_norm(module: Any, input: torch.Tensor) -> torch.Tensor | None:
    weight = module.weight
    # Of two types, or where mixed precision would have it computed in float32, the module gives another type.
    fits = type(input) in _OWN and input.is_cuda and input.dtype == weight.dtype and input.shape[-1:] == weight.shape
    if not fits or (input.dtype != torch.float32 and torch.is_autocast_enabled("cuda")):
        return None
    return F.rms_norm(input, weight.shape, weight, module.variance_epsilon)


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
