"""Steps of recurrent layers by the kernels and by PyTorch against float64 computations of the same formulas."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn import functional as F

from groupgrad.kernels import library
from groupgrad.kernels.recurrent import convolution_step, state_step


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL | None:
    if request.param == "torch":
        return None
    if library() is None:
        pytest.skip("there is no C++ compiler")
    return library()


@pytest.mark.parametrize("value_width", [3, 64, 100, 128])
@pytest.mark.parametrize("reads", [True, False])
def test_a_state_takes_in_a_token(value_width: int, reads: bool, kernels: ctypes.CDLL | None) -> None:
    rows, heads, key_heads, key_width = 5, 6, 3, 24
    torch.manual_seed(value_width)
    states = torch.randn(rows + 2, heads, key_width, value_width)
    query, key = torch.randn(2, rows, key_heads, key_width) / key_width**0.5
    value, decay = torch.randn(rows, heads, value_width), torch.rand(rows, heads)
    strength = torch.rand(rows, heads) if reads else None
    q, k = (x.double().repeat_interleave(heads // key_heads, 1)[..., None] for x in (query, key))
    expected = states[:rows].double() * decay[..., None, None]
    added = value.double()[:, :, None]
    if strength is not None:
        added = strength[..., None, None] * (added - k.mT @ expected)
    expected = expected + k * added
    beyond = states[rows:].clone()
    output = state_step(kernels, states[:rows], (query, key, value), decay, strength)
    torch.testing.assert_close(states[:rows].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.double(), (q.mT @ expected).squeeze(2), rtol=1e-5, atol=1e-5)
    assert torch.equal(states[rows:], beyond)


@pytest.mark.parametrize("norm", [True, False])
def test_queries_and_keys_are_scaled_and_have_length_one(norm: bool, kernels: ctypes.CDLL | None) -> None:
    torch.manual_seed(0)
    states, value, decay = torch.randn(3, 4, 24, 16), torch.randn(3, 4, 16), torch.rand(3, 4)
    query, key, strength = torch.randn(3, 2, 24) / 5, torch.randn(3, 2, 24) / 5, torch.rand(3, 4)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if norm else x for x in (query, key))
    expected_states = states.clone()
    expected = state_step(kernels, expected_states, (0.3 * q, k, value), decay, strength)
    output = state_step(kernels, states, (query, key, value), decay, strength, scale=0.3, norm=norm)
    # Norms and outputs are sums of 24 terms in either way of computing; a sum may cancel, so it is held to the largest.
    for found, wanted in ((output, expected), (states, expected_states)):
        rounding = 24 * torch.finfo(torch.float32).eps * float(wanted.abs().max())
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=rounding)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_takes_in_a_token(width: int, has_bias: bool, gates: bool, kernels: ctypes.CDLL | None) -> None:
    rows, channels, steps = 3, 37, 5
    weight, bias = torch.randn(channels, width), torch.randn(channels) if has_bias else None
    inputs = torch.randn(steps, channels, rows).transpose(1, 2)
    last = torch.zeros(rows, channels, width - 1)
    padded = torch.cat([torch.zeros(width - 1, rows, channels), inputs])
    for step in range(steps):
        output = convolution_step(kernels, last, inputs[step], weight, bias, gates=gates)
        expected = torch.einsum("wnd,dw->nd", padded[step : step + width], weight)
        expected = expected if bias is None else expected + bias
        torch.testing.assert_close(output, F.silu(expected) if gates else expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last, padded[steps : steps + width - 1].permute(1, 2, 0))
