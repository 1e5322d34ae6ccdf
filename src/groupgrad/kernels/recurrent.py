"""Decode steps of recurrent layers: one token for each row, with states and convolution inputs updated in place."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from groupgrad.kernels.compile import library
from groupgrad.kernels.delta_rule import EPSILON


class _StateStep(ctypes.Structure):
    """Mirrors `StateStep` of `recurrent.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "heads", "key_heads", "key_width", "value_width")),
        *(
            (name, ctypes.c_void_p)
            for name in ("states", "queries", "keys", "values", "decays", "strengths", "outputs")
        ),
        *((name, ctypes.c_float) for name in ("scale", "epsilon")),
    )


def can_step(*tensors: torch.Tensor | None) -> bool:
    """True if all tensors are float32 on the CPU, as the kernels read them."""
    return all(x is None or (x.dtype == torch.float32 and x.device.type == "cpu") for x in tensors)


def step_kernels(*tensors: torch.Tensor | None) -> ctypes.CDLL | None:
    """The compiled kernels if they can read all these tensors, else None."""
    return library() if can_step(*tensors) else None


def state_step(
    kernels: ctypes.CDLL | None,
    states: torch.Tensor,
    vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor,
    strength: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    norm: bool = False,
) -> torch.Tensor:
    """Updates the states of n rows by a token each, in place; returns (n, H, Dv) outputs q' S of the new states.

    A state S (of `states` (n, H, Dk, Dv), contiguous) becomes decay S + k u'. Without `strength` u is v, with it
    u = strength * (v - decay k' S). `vectors` are the query q and the key k, (n, Hk, Dk), where Hk divides H, and
    the value v, (n, H, Dv); decay and strength are (n, H). The query is multiplied by `scale`; with `norm`
    query and key are divided by their lengths before. Without kernels PyTorch computes the step on any device, in the
    type of the states.
    """
    if kernels is None:
        return _state_step_by_torch(states, vectors, decay, strength, scale=scale, norm=norm)
    query, key, value, decay = (x.contiguous() for x in (*vectors, decay))
    strength = None if strength is None else strength.contiguous()
    rows, heads, key_width, value_width = states.shape
    output = torch.empty_like(value)
    call = _StateStep(
        rows,
        heads,
        key.shape[1],
        key_width,
        value_width,
        states.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        decay.data_ptr(),
        None if strength is None else strength.data_ptr(),
        output.data_ptr(),
        scale,
        EPSILON if norm else -1.0,
    )
    kernels.groupgrad_state_step(ctypes.addressof(call), torch.get_num_threads())
    return output


def _state_step_by_torch(
    states: torch.Tensor,
    vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor,
    strength: torch.Tensor | None,
    *,
    scale: float,
    norm: bool,
) -> torch.Tensor:
    query, key, added = (x.to(states.dtype) for x in vectors)
    if norm:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (query, key))
    repeats = states.shape[1] // key.shape[1]
    query, key = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (query, key))
    states.mul_(decay.to(states.dtype)[..., None, None])
    if strength is not None:
        added = strength.to(states.dtype)[..., None] * (added - (key[..., None, :] @ states).squeeze(-2))
    states.addcmul_(key[..., None], added[..., None, :])
    return ((query * scale)[..., None, :] @ states).squeeze(-2)


def convolution_step(
    kernels: ctypes.CDLL | None,
    last: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gates: bool = False,
) -> torch.Tensor:
    """(n, D) convolutions of `inputs` (n, D) and the K - 1 inputs before them, which are then shifted by one in place.

    `last` (n, D, K - 1), contiguous, holds the earlier inputs; `weight` is (D, K), `bias` (D,). With `gates` silu is
    applied to the results. Without kernels PyTorch computes the step on any device.
    """
    if kernels is None:
        window = torch.cat([last, inputs[..., None].to(last.dtype)], dim=-1)
        last.copy_(window[..., 1:])
        output = (window * weight).sum(-1)
        output = output if bias is None else output + bias
        return F.silu(output) if gates else output
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    (rows, channels), width = inputs.shape, weight.shape[1]
    output = inputs.new_empty(rows, channels)
    kernels.groupgrad_convolution_step(
        last.data_ptr(),
        inputs.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
        rows,
        channels,
        width,
        inputs.stride(1),
        inputs.stride(0),
        gates,
        torch.get_num_threads(),
    )
    return output
