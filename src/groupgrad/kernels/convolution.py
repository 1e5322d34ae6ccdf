"""Causal depthwise convolutions of flat tokens by the compiled kernels, with gradients."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _Convolution(ctypes.Structure):
    """Mirrors `Convolution` of `convolution.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "channels", "width", "heads")),
        *((name, ctypes.c_void_p) for name in ("places", "windows", "inputs")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("before", "weight", "bias", "gradient", "outputs")),
        *((name, ctypes.c_void_p) for name in ("of_inputs", "of_before", "of_weight", "of_bias")),
        ("gates", ctypes.c_int64),
    )


@dataclass(slots=True, frozen=True)
class _Setting:
    """The non-differentiable arguments of a call."""

    kernels: ctypes.CDLL
    heads: tuple[torch.Tensor, torch.Tensor]
    gates: bool


def convolution(
    kernels: ctypes.CDLL,
    inputs: torch.Tensor,
    before: torch.Tensor,
    heads: tuple[torch.Tensor, torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gates: bool = False,
) -> torch.Tensor:
    """(T, D) depthwise convolutions of flat tokens over the last K inputs of each token's row, float32 on the CPU.

    `inputs` are (T, D), `weight` is (D, K), `bias` (D,). With `gates` silu is applied to the results. `heads` names the
    tokens whose last K inputs are not consecutive flat inputs: their ascending places (M,), and the places (M, K) of
    each one's last K inputs, its own last, all int64. A place of T + i is row i of `before` (E, D). There are no second
    derivatives.
    """
    setting = _Setting(kernels, heads, gates)
    return _CausalConvolution.apply(setting, inputs, before, weight, bias)  # pyright: ignore[reportReturnType]


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        setting: _Setting,
        inputs: torch.Tensor,
        before: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
        before, bias = before.contiguous(), None if bias is None else bias.contiguous()
        by_place = weight.T.contiguous()
        output = inputs.new_empty(inputs.shape)
        _run(setting, inputs, before, by_place, bias, outputs=output.data_ptr())
        ctx.save_for_backward(inputs, before, by_place, bias)
        ctx.setting = setting
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, before, weight, bias = ctx.saved_tensors
        gradient = grads[0].contiguous()
        of_inputs, of_before = inputs.new_empty(inputs.shape), torch.zeros_like(before)
        of_weight, of_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        found = {"of_inputs": of_inputs, "of_before": of_before, "of_weight": of_weight, "of_bias": of_bias}
        addresses = {name: None if x is None else x.data_ptr() for name, x in found.items()}
        _run(ctx.setting, inputs, before, weight, bias, gradient=gradient.data_ptr(), **addresses)
        return None, of_inputs, of_before, of_weight.T, of_bias


def _run(
    setting: _Setting,
    inputs: torch.Tensor,
    before: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    **results: int | None,
) -> None:
    places, windows = setting.heads
    call = _Convolution(
        tokens=len(inputs),
        channels=inputs.shape[1],
        width=len(weight),
        heads=len(places),
        places=places.data_ptr(),
        windows=windows.data_ptr(),
        inputs=inputs.data_ptr(),
        stride=inputs.stride(0),
        before=before.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        gates=setting.gates,
        **results,
    )
    setting.kernels.groupgrad_convolution(ctypes.addressof(call), torch.get_num_threads())
