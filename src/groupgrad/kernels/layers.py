"""Layers of a pass over many tokens: their numbers by the compiled kernels, with gradients.

All take float32 tensors on the CPU. What they compute of a token does not depend on the tokens beside it, and a decode
step computes the same to the last bit. Gradients of gradients do not flow through them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def linear(
    kernels: ctypes.CDLL, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(..., outputs) products of `input` (..., width) with the rows of `weight` (outputs, width), plus `bias`.

    MemoryError if there is no room for a copy of some of the rows.
    """
    if _flows(input, weight, bias):
        return _Linear.apply(kernels, input, weight, bias)  # pyright: ignore[reportReturnType]
    return product(kernels, input, weight, bias)


def product(
    kernels: ctypes.CDLL,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `linear` gives, without a gradient; written to `out` if it is given, which lies in one piece."""
    input, weight, bias = input.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    output = input.new_empty(*input.shape[:-1], len(weight)) if out is None else out
    if not output.numel():
        return output
    failed = kernels.groupgrad_linear(
        input.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
        input.numel() // input.shape[-1],
        input.shape[-1],
        len(weight),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory is left for a product of {tuple(input.shape)} and {tuple(weight.shape)}")
    return output


def norm(kernels: ctypes.CDLL, input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight * (x / sqrt(mean(x^2) + epsilon)) over the last dimension of `input`, rounded once."""
    return _Norm.apply(kernels, input, weight, epsilon)  # pyright: ignore[reportReturnType]


def gated(kernels: ctypes.CDLL, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of equal shapes."""
    return _Gated.apply(kernels, gate, up)  # pyright: ignore[reportReturnType]


def _flows(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ctypes.CDLL, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        _, of_input, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        return product(kernels, input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad, (_, of_input, of_weight, of_bias) = incoming[0], ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            None,
            flat.mm(weight).view(*grad.shape[:-1], weight.shape[1]) if of_input else None,
            flat.t().mm(input.reshape(-1, input.shape[-1])) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ctypes.CDLL, input: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        input, weight = input.contiguous(), weight.contiguous()
        output, factors = torch.empty_like(input), input.new_empty(input.shape[:-1])
        kernels.groupgrad_norm(
            input.data_ptr(),
            weight.data_ptr(),
            epsilon,
            output.data_ptr(),
            factors.data_ptr(),
            factors.numel(),
            len(weight),
            torch.get_num_threads(),
        )
        ctx.kernels = kernels
        ctx.save_for_backward(input, weight, factors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, factors = ctx.saved_tensors
        grad, threads = incoming[0].contiguous(), torch.get_num_threads()
        of_input = torch.empty_like(input)
        of_weight = input.new_zeros(threads, len(weight)) if ctx.needs_input_grad[2] else None
        ctx.kernels.groupgrad_norm_gradient(
            *(x.data_ptr() for x in (grad, input, weight, factors, of_input)),
            None if of_weight is None else of_weight.data_ptr(),
            factors.numel(),
            len(weight),
            threads,
        )
        return None, of_input, None if of_weight is None else of_weight.sum(0), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ctypes.CDLL, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        output = torch.empty_like(gate)
        pointers = [x.data_ptr() for x in (gate, up, output)]
        kernels.groupgrad_gate(*pointers, gate.numel(), torch.get_num_threads())
        ctx.kernels = kernels
        ctx.save_for_backward(gate, up)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad, of_gate, of_up = incoming[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        pointers = [x.data_ptr() for x in (grad, gate, up, of_gate, of_up)]
        ctx.kernels.groupgrad_gate_gradient(*pointers, gate.numel(), torch.get_num_threads())
        return None, of_gate, of_up
