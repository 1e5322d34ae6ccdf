"""Linear layers, norms and gates of many tokens: numbers of float64, gradients, the same bits whatever is beside."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import nn

from groupgrad.kernels import layers
from groupgrad.kernels.layers import Activation, gated, gated_linear, linear, norm

HALF_UNIT = 2.0**-24
"""Maximum relative error of rounding a number to float32 once."""
INF, NAN = math.inf, math.nan


def off_by(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the number that is expected."""
    return float(((found.double() - expected).abs() / expected.abs()).max())


def gradients(compute: Callable[..., torch.Tensor], inputs: list[Any], grad_output: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the inputs for the output gradient `grad_output`."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(compute(*leaves), leaves, grad_output))


def assert_gradients(
    compute: Callable[..., torch.Tensor], exact: Callable[..., torch.Tensor], inputs: list[Any], within: float = 2e-6
) -> None:
    """Gradients of `compute` are those of `exact` in float64 but for a small part of the largest."""
    grad_output = torch.randn_like(compute(*inputs))
    found = gradients(compute, inputs, grad_output)
    expected = gradients(exact, [x.double() for x in inputs], grad_output.double())
    for number, (grad, want) in enumerate(zip(found, expected)):
        assert grad.dtype == torch.float32 and grad.shape == want.shape
        torch.testing.assert_close(
            grad.double(), want, rtol=1e-5, atol=within * float(want.abs().max()), msg=lambda m, n=number: f"{n}: {m}"
        )


# ------------------------------------------------------------------------------------------------ linear


@pytest.mark.parametrize(("width", "outputs"), [(1, 3), (20, 50), (37, 29), (200, 97), (515, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_alone_gets_the_same_numbers_as_among_others(
    width: int, outputs: int, has_bias: bool, kernels: ctypes.CDLL, threads: Callable[[int], None]
):
    torch.manual_seed(width)
    inputs, weight = torch.randn(300, width), torch.randn(outputs, width)
    bias = torch.randn(outputs) if has_bias else None
    threads(1)
    alone = torch.stack([linear(kernels, row, weight, bias) for row in inputs])
    expected = nn.functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=2e-7 * width)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 65, 130, 300):
        threads(1 + rows % 3)
        for first in (0, 300 - rows):
            found = linear(kernels, inputs[first : first + rows], weight, bias)
            assert torch.equal(found, alone[first : first + rows]), rows


def test_rows_are_alike_over_chunks_of_them(kernels: ctypes.CDLL, threads: Callable[[int], None]):
    # So wide that 64 rows are a chunk, and so narrow that they are many.
    torch.manual_seed(0)
    for width, rows in ((5000, 150), (3, 100_000)):
        inputs, weight = torch.randn(rows, width), torch.randn(7, width)
        threads(3)
        found = linear(kernels, inputs, weight)
        threads(1)
        for at in (0, 63, 64, 65, 127, 128, rows - 1):
            assert torch.equal(found[at], linear(kernels, inputs[at], weight)), (width, at)
        torch.testing.assert_close(found.double(), inputs.double() @ weight.double().T, rtol=1e-5, atol=1e-3)


def test_inputs_may_have_any_strides(kernels: ctypes.CDLL):
    torch.manual_seed(0)
    inputs, weight, bias = torch.randn(2, 5, 3, 37), torch.randn(29, 37), torch.randn(29)
    expected = linear(kernels, inputs, weight, bias)
    assert expected.shape == (2, 5, 3, 29)
    moved = inputs.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    wide = torch.randn(2, 5, 3, 80)[..., 1:75:2].copy_(inputs)
    tall = weight.T.contiguous().T
    every_second = torch.stack([bias, -bias], dim=1).flatten()[::2]
    assert not any(x.is_contiguous() for x in (moved, wide, tall, every_second))
    assert torch.equal(linear(kernels, moved, tall, every_second), expected)
    assert torch.equal(linear(kernels, wide, weight, bias), expected)
    assert torch.equal(linear(kernels, inputs[:1].expand(4, -1, -1, -1), weight, bias)[3], expected[0])


@pytest.mark.parametrize(("width", "outputs"), [(1, 3), (37, 29), (515, 97), (5000, 7)])
def test_weights_in_bfloat16_give_the_products_of_float32(
    width: int, outputs: int, kernels: ctypes.CDLL, threads: Callable[[int], None]
):
    torch.manual_seed(width)
    inputs, weight, bias = torch.randn(150, width), torch.randn(outputs, width).bfloat16(), torch.randn(outputs)
    threads(1 + width % 3)
    for rows in (1, 4, 5, 9, 16, 24, 32, 49, 64, 150):  # blocks of every size
        found = linear(kernels, inputs[:rows], weight, bias.bfloat16())
        assert torch.equal(found, linear(kernels, inputs[:rows], weight.float(), bias.bfloat16().float())), rows


@pytest.mark.parametrize("has_instructions", [False, True])
def test_gradients_of_weights_in_bfloat16_are_rounded_once_or_products_of_rounded_factors(
    has_instructions: bool, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: has_instructions)
    torch.manual_seed(0)
    inputs, bias = torch.randn(70, 48, requires_grad=True), torch.randn(33).bfloat16().requires_grad_()
    weight, grad_output = torch.randn(33, 48).bfloat16().requires_grad_(), torch.randn(70, 33)
    found = torch.autograd.grad(linear(kernels, inputs, weight, bias), [inputs, weight, bias], grad_output)
    assert [grad.dtype for grad in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    factor, state = (x.detach().bfloat16() if has_instructions else x.detach() for x in (grad_output, inputs))
    wide = weight.detach().double()
    expected = [factor.double() @ wide, factor.double().t() @ state.double(), grad_output.double().sum(0)]
    # Numbers in bfloat16 have eight bits, so rounding moves one by 2^-8 of it at most. Sums are in float32.
    for grad, want, is_half in zip(found, expected, (has_instructions, True, True)):
        rounding = 2.0**-8 if is_half else 1e-5
        torch.testing.assert_close(grad.double(), want, rtol=1.1 * rounding, atol=2e-5)


@pytest.mark.parametrize("shape", [(), (1,), (70,), (2, 9)])
def test_gradients_of_products_are_those_of_float64(shape: tuple[int, ...], kernels: ctypes.CDLL):
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, 37), torch.randn(29, 37), torch.randn(29)]
    assert_gradients(lambda *x: linear(kernels, *x), nn.functional.linear, inputs)
    assert_gradients(lambda *x: linear(kernels, *x), nn.functional.linear, inputs[:2])


def test_no_rows_have_gradients_too(kernels: ctypes.CDLL):
    inputs = [torch.randn(0, 37), torch.randn(29, 37), torch.randn(29)]
    of_input, of_weight, of_bias = gradients(lambda *x: linear(kernels, *x), inputs, torch.randn(0, 29))
    assert of_input.shape == (0, 37) and not of_weight.any() and not of_bias.any()
    (of_input,) = gradients(lambda x: norm(kernels, x, torch.ones(37), 1e-6), inputs[:1], torch.randn(0, 37))
    assert of_input.shape == (0, 37)
    (of_gate, _) = gradients(lambda *x: gated(kernels, *x), [inputs[0]] * 2, torch.randn(0, 37))
    assert of_gate.shape == (0, 37)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_what_needs_a_gradient_gets_one(wanted: tuple[int, ...], kernels: ctypes.CDLL):
    torch.manual_seed(0)
    tensors = [torch.randn(6, 37), torch.randn(29, 37), torch.randn(29)]
    everything = gradients(lambda *x: linear(kernels, *x), tensors, torch.ones(6, 29))
    for number in wanted:
        tensors[number].requires_grad_()
    linear(kernels, *tensors).sum().backward()
    for number, (tensor, grad) in enumerate(zip(tensors, everything)):
        assert (tensor.grad is not None) == (number in wanted)
        assert tensor.grad is None or torch.equal(tensor.grad, grad)


def test_a_frozen_weight_keeps_no_inputs(kernels: ctypes.CDLL):
    inputs, weight = torch.randn(6, 37, requires_grad=True), torch.randn(29, 37)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(kernels, inputs, weight, torch.randn(29, requires_grad=True))
        assert [x.data_ptr() for x in kept] == [weight.data_ptr()]
        kept.clear()
        linear(kernels, inputs.detach(), weight.requires_grad_())
        assert [x.data_ptr() for x in kept] == [inputs.data_ptr()]
        kept.clear()
        with torch.no_grad():
            assert not linear(kernels, inputs, weight).requires_grad
        assert not kept


def test_numbers_that_are_none_stay_in_their_rows(kernels: ctypes.CDLL):
    torch.manual_seed(0)
    inputs, weight = torch.randn(20, 37), torch.randn(29, 37)
    plain = linear(kernels, inputs, weight)
    inputs[3, 5], inputs[11, 0] = NAN, INF
    found = linear(kernels, inputs, weight)
    assert found[3].isnan().all() and found[11].isinf().all()
    others = [i for i in range(20) if i not in (3, 11)]
    assert torch.equal(found[others], plain[others])


# ------------------------------------------------------------------------------------------------ norms


def exact_norm(input: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
    return weight.double() * (input / (input.square().mean(-1, keepdim=True) + epsilon).sqrt())


@pytest.mark.parametrize("width", [*range(1, 18), 31, 33, 40, 128, 1000])
def test_norms_are_rounded_once_and_have_their_gradients(width: int, kernels: ctypes.CDLL):
    torch.manual_seed(width)
    inputs = torch.randn(2, 9, width) * torch.logspace(-2, 4, 9)[:, None]
    weight = torch.empty(width).uniform_(0.5, 2.0)
    found = norm(kernels, inputs, weight, 1e-5)
    assert off_by(found, exact_norm(inputs.double(), weight)) <= 1.01 * HALF_UNIT
    alone = torch.stack([norm(kernels, row, weight, 1e-5) for row in inputs.flatten(0, 1)])
    assert torch.equal(found.flatten(0, 1), alone)
    # With a small epsilon a norm of one number is its sign, whose gradient is all rounding.
    exact = lambda x, w: exact_norm(x, w, 0.25)  # noqa: E731
    assert_gradients(lambda x, w: norm(kernels, x, w, 0.25), exact, [torch.randn(5, 3, width), weight])


def test_long_inputs_are_shared_among_threads(kernels: ctypes.CDLL, threads: Callable[[int], None]):
    torch.manual_seed(0)
    inputs, weight, grad_output = torch.randn(900, 40), torch.randn(40), torch.randn(900, 40)
    computed = []
    for number in (1, 3):
        threads(number)
        normal = lambda x, w: norm(kernels, x, w, 1e-5)  # noqa: E731
        of_norm = gradients(normal, [inputs, weight], grad_output)
        gate = lambda x, y: gated(kernels, x, y)  # noqa: E731
        of_gate = gradients(gate, [inputs, grad_output], grad_output)
        computed.append([normal(inputs, weight), of_norm[0], gate(inputs, grad_output), *of_gate, of_norm[1]])
    *same, (one, other) = zip(*computed)
    assert all(torch.equal(a, b) for a, b in same)
    # A sum over 900 rows of terms of about 1: each addition rounds by at most half a unit of a partial sum of about 30.
    # Such roundings have random signs, so they add up as the root of their number, in either of the two sums.
    rounding = 6 * 900**0.5 * 30 * HALF_UNIT
    torch.testing.assert_close(one, other, rtol=1e-5, atol=rounding)


def test_norms_take_inputs_of_any_strides_and_frozen_weights(kernels: ctypes.CDLL):
    torch.manual_seed(0)
    inputs, weight = torch.randn(4, 7, 10), torch.randn(10)
    expected = norm(kernels, inputs, weight, 1e-6)
    moved = inputs.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    found = norm(kernels, moved, torch.stack([weight, weight], dim=1)[:, 0], 1e-6)
    assert torch.equal(found, expected)
    found.sum().backward()
    (grad,) = gradients(lambda x: norm(kernels, x, weight, 1e-6), [inputs], torch.ones(4, 7, 10))
    assert moved.grad is not None and torch.equal(moved.grad, grad)


# ------------------------------------------------------------------------------------------------ gates


def exact_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate) * up


def exact_gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GELU with a hyperbolic tangent, as a sigmoid: 1 + tanh(z) of a very negative z is 0 in float64."""
    return gate * torch.sigmoid(2 * inner_of_gelu(gate)) * up


def inner_of_gelu(gate: torch.Tensor) -> torch.Tensor:
    return math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)


@pytest.mark.parametrize("shape", [(1,), (5,), (16,), (33, 50), (3, 4, 1400)])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates_and_their_gradients_are_those_of_float64(
    activation: Activation, shape: tuple[int, ...], kernels: ctypes.CDLL
):
    torch.manual_seed(0)
    is_gelu = activation == "gelu_tanh"
    gate, up = (2 * torch.randn(shape)).clamp(-5, 5) if is_gelu else 6 * torch.randn(shape), torch.randn(shape)
    wide, wide_up = gate.double(), up.double()
    exact = exact_gelu if is_gelu else exact_gated
    # A rounded exponent of GELU makes an exponential wrong by as many half units as it is large.
    half_units = 10 + 6 * inner_of_gelu(wide).abs() if is_gelu else 10
    compute = lambda *x: gated(kernels, *x, activation=activation)  # noqa: E731
    found, expected = compute(gate, up), exact(wide, wide_up)
    assert ((found.double() - expected).abs() <= half_units * HALF_UNIT * expected.abs()).all()
    if is_gelu:
        torch.testing.assert_close(expected, nn.functional.gelu(wide, approximate="tanh") * wide_up, rtol=0, atol=1e-14)
    alone = torch.cat([compute(a, b) for a, b in zip(gate.flatten()[:40].split(1), up.flatten()[:40].split(1))])
    assert torch.equal(found.flatten()[:40], alone)
    assert_gradients(compute, exact, [gate, up])


def test_extreme_gelu_gates(kernels: ctypes.CDLL):
    gate = torch.tensor([1e38, 1e20, 100.0, 0.0, -0.0, -20.0, -1e4, -1e20, NAN])
    up = torch.full_like(gate, 1.5)
    gelu = lambda *x: gated(kernels, *x, activation="gelu_tanh")  # noqa: E731
    found = gelu(gate, up)
    assert found[:3].tolist() == pytest.approx([1.5e38, 1.5e20, 150.0]) and found[8].isnan()
    assert found[3:8].tolist() == pytest.approx([0.0] * 5, abs=1e-17)
    of_gate, of_up = gradients(gelu, [gate, up], torch.ones(9))
    assert of_gate[:8].tolist() == pytest.approx([1.5, 1.5, 1.5, 0.75, 0.75, 0.0, 0.0, 0.0], abs=1e-6)
    assert of_up[:8].tolist() == pytest.approx([1e38, 1e20, 100.0, *[0.0] * 5], rel=1e-6, abs=1e-17)


def test_gates_take_inputs_of_any_strides(kernels: ctypes.CDLL):
    gate, up = torch.randn(9, 20), torch.randn(20, 9)
    expected = gated(kernels, gate, up.T.contiguous())
    assert torch.equal(gated(kernels, gate, up.T), expected)
    assert torch.equal(gated(kernels, gate.T.contiguous().T, up.T), expected)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_of_gates_keeps_no_result_of_them(has_bias: bool, activation: Activation, kernels: ctypes.CDLL):
    torch.manual_seed(0)
    inputs = [2 * torch.randn(3, 5, 37), torch.randn(3, 5, 37), torch.randn(29, 37)]
    inputs += [torch.randn(29)] if has_bias else []
    apart = lambda gate, up, *rest: linear(kernels, gated(kernels, gate, up, activation), *rest)  # noqa: E731
    together = lambda *x: gated_linear(kernels, *x, activation=activation)  # noqa: E731
    assert torch.equal(together(*inputs), apart(*inputs))
    grad_output = torch.randn(3, 5, 29)
    for found, expected in zip(gradients(together, inputs, grad_output), gradients(apart, inputs, grad_output)):
        assert torch.equal(found, expected)
    kept: list[int] = []
    leaves = [x.requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        together(*leaves)
    assert kept == [x.data_ptr() for x in leaves[:3]]


@pytest.mark.parametrize("place", [0, 15, 16, 20])
def test_extreme_gates(place: int, kernels: ctypes.CDLL):
    for value in (100.0, 88.5, 1e4, 1e38, INF, -80.0, -87.5, -88.5, -100.0, -1e4, -1e20, 0.0, -0.0, 1e-40):
        gate, up = torch.ones(21), torch.full((21,), 1.5)
        gate[place] = value
        found = gated(kernels, gate, up)
        rest = torch.ones(21).bool()
        rest[place] = False
        assert (found[rest] == gated(kernels, torch.ones(1), up[:1])).all()
        expected = value * 1.5 if value > 80 else value / (1 + math.exp(min(-value, 700.0))) * 1.5
        assert float(found[place]) == pytest.approx(expected, rel=1e-6, abs=1e-17), value
        if math.isfinite(value):
            of_gate, of_up = gradients(lambda *x: gated(kernels, *x), [gate, up], torch.ones(21))
            slope = 1.5 if value > 80 else 0.75 if abs(value) < 1 else 0.0
            assert float(of_gate[place]) == pytest.approx(slope, abs=1e-6), value
            assert float(of_up[place]) == pytest.approx(expected / 1.5, rel=1e-6, abs=1e-17)


def test_gates_that_are_no_numbers_stay_so(kernels: ctypes.CDLL):
    gate, up = torch.tensor([NAN, 1.0, 2.0, INF]), torch.tensor([1.0, NAN, 2.0, 0.0])
    found = gated(kernels, gate, up)
    assert found.isnan().tolist() == [True, True, False, True]
    of_gate, of_up = gradients(lambda *x: gated(kernels, *x), [gate, up], torch.ones(4))
    assert of_gate.isnan()[:3].tolist() == [True, True, False] and of_up.isnan()[:3].tolist() == [True, False, False]
