"""What parts of known models compute in a pass on a CPU: exactly where it counts, and as decode steps do.

Linear layers, RMS norms and the gates of layers are computed by the compiled kernels (see `kernels`), which give a
token the same numbers when it is sampled and when it is trained. Norms are computed in float64: their factor scales
all numbers of a vector together, so its rounding does not average out in the products that follow. Their backward
passes go over memory fewer times than those that autograd puts together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from groupgrad import kernels
from groupgrad.kernels import parts
from groupgrad.models.attention import is_checkpointing
from groupgrad.models.sharded import is_sharded

_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
"""Of transformers, which compute weight * (x / sqrt(mean(x^2) + epsilon)) in this very form."""

_GATES = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
"""Of transformers, which compute down(activation(gate(x)) * up(x))."""

_ACTIVATIONS = frozenset({"SiLU", "SiLUActivation"})


@contextmanager
def compiled_parts(model: nn.Module) -> Iterator[None]:
    """The float32 parts of known kinds inside `model` on CPUs computed by the kernels, as long as this lasts.

    Without compiled kernels norms alone are taken over, in float64. With gradient checkpointing the parts stay so until
    `own_parts`: layers are computed again when this is long over. Sharded and compiled models are left as they are, and
    parts that somebody else has replaced. Gradients of gradients do not flow through them.
    """
    replaced: list[Any] = []
    stays = torch.is_grad_enabled() and is_checkpointing(model)
    if not is_sharded(model) and not _is_compiled(model):
        library = kernels.library() if any(p.device.type == "cpu" for p in model.parameters()) else None
        for module in model.modules():
            compute = _replacement(module, library)
            if compute is not None:
                module.forward = _Replaced(module, compute, stays)
                replaced.append(module)
    try:
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


class _Replaced:
    """Computes a part in place of its class, unless the input is of another kind or somebody watches what is saved."""

    def __init__(self, module: Any, compute: Any, stays: bool):
        self._module, self._compute, self._stays = module, compute, stays

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        # Somebody else's checkpointing: what is computed again later has to save the same tensors.
        is_watched = not self._stays and _saves_in_another_way()
        (hidden,) = (*inputs, *named.values())
        if is_watched or not _is_plain_input(hidden) or torch.is_autocast_enabled("cpu"):
            return type(self._module).forward(self._module, hidden)
        return self._compute(self._module, hidden)


def _replacement(module: nn.Module, library: ctypes.CDLL | None) -> Any:
    """What computes a module's part, or None."""
    if "forward" in module.__dict__:
        return None
    kind = type(module)
    if kind is nn.Linear:
        return partial(_linear, library) if library is not None and _is_plain(module.weight, module.bias) else None
    if not kind.__module__.startswith("transformers.models.") or kind.forward.__module__ != kind.__module__:
        return None
    if kind.__name__ in _NORMS:
        return partial(_normalise, library) if _is_plain(module._parameters.get("weight")) else None
    is_gate = kind.__name__ in _GATES and type(module.act_fn).__name__ in _ACTIVATIONS
    return partial(_gate, library) if library is not None and is_gate else None


def _is_plain(weight: Any, *others: Any) -> bool:
    """True for float32 parameters on a CPU, whose classes are no other's."""
    if type(weight) is not nn.Parameter or not weight.numel():
        return False
    return all(p is None or (p.dtype == torch.float32 and p.device.type == "cpu") for p in (weight, *others))


def _is_plain_input(hidden: torch.Tensor) -> bool:
    return type(hidden) is torch.Tensor and hidden.dtype == torch.float32 and hidden.device.type == "cpu"


def _is_compiled(model: nn.Module) -> bool:
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def _saves_in_another_way() -> bool:
    """True if what is saved for the backward pass goes through somebody's hooks."""
    find = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return find is not None and find(True) is not None


def _linear(library: ctypes.CDLL, module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return parts.linear(library, input, module.weight, module.bias)


def _normalise(library: ctypes.CDLL | None, module: Any, input: torch.Tensor) -> torch.Tensor:
    if library is None:
        return _Norm.apply(input, module.weight, module.variance_epsilon)  # pyright: ignore[reportReturnType]
    return parts.norm(library, input, module.weight, module.variance_epsilon)


def _gate(library: ctypes.CDLL, module: Any, input: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_proj(input), module.up_proj(input)
    if gate.dtype != torch.float32 or up.dtype != torch.float32:
        return module.down_proj(module.act_fn(gate) * up)
    return module.down_proj(parts.gated(library, gate, up))


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
