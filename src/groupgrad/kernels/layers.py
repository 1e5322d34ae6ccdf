"""Linear layers, RMS norms, gates and rotary embeddings of many tokens by the compiled kernels, with gradients.

All take float32 tensors on the CPU; weights of linear layers may be bfloat16, and outputs are float32 all the same. A
token's numbers do not depend on the other tokens of the call, and a decode step computes bit-exactly the same numbers.
There are no second derivatives. Gradients of bfloat16 weights are products of bfloat16 factors where the processor has
instructions for them.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from groupgrad.kernels.compile import processor_flags

Activation = Literal["silu", "gelu_tanh"]
"""The activation of a gate: x * sigmoid(x), or GELU with a hyperbolic tangent (arXiv:1606.08415, section 2)."""


def linear(
    kernels: ctypes.CDLL, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(..., outputs) products of `input` (..., width) with the rows of `weight` (outputs, width), plus `bias`.

    MemoryError if a copy of some of the rows does not fit.
    """
    if _needs_gradient(input, weight, bias):
        return _Linear.apply(kernels, input, weight, bias)  # pyright: ignore[reportReturnType]
    return product(kernels, input, weight, bias)


def product(
    kernels: ctypes.CDLL,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` without a gradient, written to `out` if given, which has to be contiguous."""
    _check_types(input, weight if weight.dtype != torch.bfloat16 else input)
    input, weight, bias = input.contiguous(), weight.contiguous(), None if bias is None else bias.float().contiguous()
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
        weight.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory is left for a product of {tuple(input.shape)} and {tuple(weight.shape)}")
    return output


def norm(kernels: ctypes.CDLL | None, input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight * (x / sqrt(mean(x^2) + epsilon)) over the last dimension of `input`, rounded once.

    PyTorch computes it in float64 where there are no kernels.
    """
    if kernels is not None and not _needs_gradient(input, weight):
        return _normalised(kernels, input.contiguous(), weight.contiguous(), epsilon)[0]
    return _Norm.apply(kernels, input, weight, epsilon)  # pyright: ignore[reportReturnType]


def gated(kernels: ctypes.CDLL, gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """activation(gate) * up, of equal shapes."""
    if not _needs_gradient(gate, up):
        return _activated(kernels, gate.contiguous(), up.contiguous(), activation)
    return _Gated.apply(kernels, gate, up, activation)  # pyright: ignore[reportReturnType]


def gated_linear(
    kernels: ctypes.CDLL,
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """`linear` of `gated`; the backward pass computes `gated` again instead of keeping its output."""
    if _needs_gradient(gate, up) and _needs_gradient(weight):
        return _GatedLinear.apply(kernels, gate, up, weight, bias, activation)  # pyright: ignore[reportReturnType]
    return linear(kernels, gated(kernels, gate, up, activation), weight, bias)


def rotated(kernels: ctypes.CDLL, input: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """(1, H, T, D) vectors x as x * cosines + (-x[D/2:], x[:D/2]) * sines, of (1, T, D) each, rounded as torch does."""
    return _Rotated.apply(kernels, input, cosines, sines)  # pyright: ignore[reportReturnType]


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _check_types(*tensors: torch.Tensor) -> None:
    """TypeError for tensors that the kernels would misread."""
    for tensor in tensors:
        if tensor.dtype != torch.float32:
            raise TypeError(f"the compiled kernels take float32 numbers, not {tensor.dtype}")


def _normalised(
    kernels: ctypes.CDLL, input: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of contiguous vectors, and the factor of each."""
    _check_types(input, weight)
    output, factors = torch.empty_like(input), input.new_empty(input.shape[:-1])
    sizes = (factors.numel(), len(weight), torch.get_num_threads())
    kernels.groupgrad_norm(input.data_ptr(), weight.data_ptr(), epsilon, output.data_ptr(), factors.data_ptr(), *sizes)
    return output, factors


def _activated(kernels: ctypes.CDLL, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`gated` of contiguous tensors, without a gradient."""
    _check_types(gate, up)
    output = torch.empty_like(gate)
    pointers = [x.data_ptr() for x in (gate, up, output)]
    kernels.groupgrad_gate(*pointers, gate.numel(), activation == "gelu_tanh", torch.get_num_threads())
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ctypes.CDLL, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        _, input_trains, weight_trains, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if weight_trains else None, weight if input_trains else None)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return product(kernels, input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad, (_, input_trains, weight_trains, bias_trains) = grads[0], ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        factor = _factor(flat, ctx.weight_dtype)
        return (
            None,
            _product(factor, weight).float().view(*grad.shape[:-1], weight.shape[1]) if input_trains else None,
            _weight_gradient(factor, input, ctx.weight_dtype) if weight_trains else None,
            flat.sum(0).to(ctx.bias_dtype) if bias_trains else None,
        )


@functools.cache
def multiplies_bfloat16() -> bool:
    """True if the processor has instructions for products of bfloat16 numbers."""
    return not processor_flags().isdisjoint(("avx512_bf16", "amx_bf16"))


def _factor(gradient: torch.Tensor, weight_dtype: torch.dtype) -> torch.Tensor:
    """A gradient as a factor of products with a weight of this type and with its inputs."""
    return gradient.to(weight_dtype) if multiplies_bfloat16() else gradient


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(m, n) left (m, k) @ right (k, n) in the type of `left`."""
    return left.mm(right.to(left.dtype))


def _weight_gradient(factor: torch.Tensor, input: torch.Tensor, weight_dtype: torch.dtype) -> torch.Tensor:
    """(outputs, width) the gradient of a linear layer's weight; `factor` (T, outputs) is `_factor` of its output's."""
    return _product(factor.t(), input.reshape(-1, input.shape[-1])).to(weight_dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ctypes.CDLL | None, input: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        input, weight, ctx.kernels = input.contiguous(), weight.contiguous(), kernels
        if kernels is None:
            wide = input.double()
            factors = (wide.square().mean(-1) + epsilon).rsqrt_()
            ctx.save_for_backward(input, weight, factors.float())
            return wide.mul_(factors[..., None]).mul_(weight).float()
        output, factors = _normalised(kernels, input, weight, epsilon)
        ctx.save_for_backward(input, weight, factors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, factors = ctx.saved_tensors
        grad, threads, weight_trains = grads[0].contiguous(), torch.get_num_threads(), ctx.needs_input_grad[2]
        if ctx.kernels is None:
            normal = input * factors[..., None]
            grad_weight = (grad * normal).flatten(0, -2).sum(0) if weight_trains else None
            grad = grad * weight
            parallel = normal * (grad * normal).mean(-1, keepdim=True)
            return None, grad.sub_(parallel).mul_(factors[..., None]), grad_weight, None
        grad_input = torch.empty_like(input)
        grad_weight = input.new_zeros(threads, len(weight)) if weight_trains else None
        ctx.kernels.groupgrad_norm_gradient(
            *(x.data_ptr() for x in (grad, input, weight, factors, grad_input)),
            None if grad_weight is None else grad_weight.data_ptr(),
            factors.numel(),
            len(weight),
            threads,
        )
        return None, grad_input, None if grad_weight is None else grad_weight.sum(0), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ctypes.CDLL, gate: torch.Tensor, up: torch.Tensor, activation: Activation
    ) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        output = _activated(kernels, gate, up, activation)
        ctx.kernels, ctx.activation = kernels, activation
        ctx.save_for_backward(gate, up)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return None, *_gate_gradients(ctx, grads[0].contiguous(), gate, up), None


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: ctypes.CDLL,
        gate: torch.Tensor,
        up: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        gate, up, ctx.kernels, ctx.activation = gate.contiguous(), up.contiguous(), kernels, activation
        ctx.save_for_backward(gate, up, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return product(kernels, _activated(kernels, gate, up, activation), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        factor = _factor(flat, weight.dtype)
        inner = _product(factor, weight).float()
        of_gate, of_up = _gate_gradients(ctx, inner, gate, up, inner)
        of_bias = flat.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[4] else None
        return None, of_gate, of_up, _weight_gradient(factor, inner, weight.dtype), of_bias, None


def _gate_gradients(
    ctx: Any, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, output: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `gated` with respect to both inputs. `output`, if given, gets its result; it may be `grad`."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    pointers = [None if x is None else x.data_ptr() for x in (grad, gate, up, of_gate, of_up, output)]
    is_gelu, threads = ctx.activation == "gelu_tanh", torch.get_num_threads()
    ctx.kernels.groupgrad_gate_gradient(*pointers, gate.numel(), is_gelu, threads)
    return of_gate, of_up


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ctypes.CDLL, input: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> torch.Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(cosines, sines)
        return _rotate(kernels, input, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        back = sines.roll(sines.shape[-1] // 2, -1).neg_()
        return None, _rotate(ctx.kernels, grads[0], cosines, back), None, None


def _rotate(kernels: ctypes.CDLL, input: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    input = input.transpose(1, 2).contiguous()
    output = torch.empty_like(input)
    pointers = [x.data_ptr() for x in (input, cosines.contiguous(), sines.contiguous(), output)]
    kernels.groupgrad_rotate(*pointers, *input.shape[1:], torch.get_num_threads())
    return output.transpose(1, 2)
