"""Causal convolutions by the compiled kernels against a float64 loop over the tokens of each row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from token_spans import make_spans
from torch.nn import functional as F

from groupgrad.kernels.convolution import convolution
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.recurrence import Recurrence

LENGTHS = ((7, (3, 1, 90)), (1, (5, 2)), (0, (70,)), (2, (1,)))
"""The lengths of each prompt and of the rows behind it, in tokens."""
Tensors = list[torch.Tensor]


def random_tensors(width: int, channels: int, *, has_bias: bool = True) -> Tensors:
    """Inputs (T, D), of which the kernel reads a part of a wider tensor, weights and bias."""
    torch.manual_seed(width)
    num_tokens = sum(span.length for span in make_spans(LENGTHS)[0])
    inputs = torch.randn(num_tokens, channels + 5)[:, 2 : 2 + channels]
    return [inputs, torch.randn(channels, width), *([torch.randn(channels)] if has_bias else [])]


def slopes(output: torch.Tensor) -> torch.Tensor:
    """The gradient of the outputs."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1))


def computed(
    kernels: ctypes.CDLL, tensors: Tensors, *, gates: bool = True, spans: list[TokenSpan] | None = None
) -> Tensors:
    """The outputs of `LENGTHS`, and the gradients of the tensors."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    recurrence = Recurrence(spans or make_spans(LENGTHS)[0])
    heads = recurrence.heads(leaves[1].shape[1], torch.device("cpu"))
    before = recurrence.inputs_before(leaves[0].T, leaves[1].shape[1]).T
    bias = leaves[2] if len(leaves) == 3 else None
    output = convolution(kernels, leaves[0], before, heads, leaves[1], bias, gates=gates)
    return [output.detach(), *torch.autograd.grad((output * slopes(output)).sum(), leaves)]


def expected(tensors: Tensors, *, gates: bool = True) -> Tensors:
    """The same in float64, one token after the other."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    inputs, weight, *bias = leaves
    outputs: dict[int, torch.Tensor] = {}
    for places in make_spans(LENGTHS)[1]:
        window = [torch.zeros(len(weight), dtype=torch.float64)] * weight.shape[1]
        for place in places:
            window = [*window[1:], inputs[place]]
            outputs[place] = (torch.stack(window, dim=1) * weight).sum(1) + sum(bias)
    output = torch.stack([outputs[place] for place in sorted(outputs)])
    output = F.silu(output) if gates else output
    return [output.detach(), *torch.autograd.grad((output * slopes(output).double()).sum(), leaves)]


def assert_same(found: Tensors, wanted: Tensors) -> None:
    for name, measured, want in zip(("output", "inputs", "weight", "bias"), found, wanted, strict=False):
        scale = float(want.abs().max())
        torch.testing.assert_close(measured.double(), want, rtol=1e-5, atol=1e-6 * scale, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("width", "channels"), [(1, 8), (2, 64), (3, 37), (4, 130)])
def test_outputs_and_gradients_are_those_of_the_tokens_in_turn(
    width: int, channels: int, has_bias: bool, gates: bool, kernels: ctypes.CDLL
) -> None:
    tensors = random_tensors(width, channels, has_bias=has_bias)
    assert_same(computed(kernels, tensors, gates=gates), expected(tensors, gates=gates))


def test_spans_may_come_in_any_order(kernels: ctypes.CDLL) -> None:
    tensors, spans = random_tensors(4, 16), make_spans(LENGTHS)[0]
    prompts = [span for span in spans if span.shared is None]
    others = [span for span in spans if span.shared is not None]
    assert_same(computed(kernels, tensors, spans=[*others[::-1], *prompts]), expected(tensors))


def test_inputs_before_a_span_are_read_and_get_their_gradients(kernels: ctypes.CDLL) -> None:
    """A convolution in two calls, of which the second begins with the last inputs of the first."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(20, 4), torch.randn(9, 20)
    results = []
    for cut in (9, 5):
        leaves = [x.clone().requires_grad_() for x in (inputs, weight)]
        heads = Recurrence([TokenSpan(0, cut)]).heads(4, torch.device("cpu"))
        parts = [convolution(kernels, leaves[0][:cut], torch.zeros(1, 20), heads, leaves[1], None)]
        if cut < 9:
            places = torch.arange(3)
            windows = torch.tensor([[4, 5, 6, 0], [5, 6, 0, 1], [6, 0, 1, 2]])  # those from place 4 on are before
            before = leaves[0][cut - 3 : cut]
            parts.append(convolution(kernels, leaves[0][cut:], before, (places, windows), leaves[1], None))
        output = torch.cat(parts)
        results.append([output.detach(), *torch.autograd.grad((output * slopes(output)).sum(), leaves)])
    for found, wanted in zip(*results[::-1]):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_no_number_depends_on_threads_or_on_other_rows(kernels: ctypes.CDLL, threads: Callable[[int], None]) -> None:
    inputs, weight, bias = random_tensors(4, 200)
    threads(1)
    alone = computed(kernels, [inputs, weight, bias])
    threads(3)
    together = computed(kernels, [inputs, weight, bias])
    assert all(map(torch.equal, together, alone))
    first = LENGTHS[:1]
    spans, rows = make_spans(first)
    num_tokens = 1 + max(map(max, rows))
    heads = Recurrence(spans).heads(4, torch.device("cpu"))
    some = convolution(kernels, inputs[:num_tokens], torch.zeros(1, 200), heads, weight, bias, gates=True)
    assert torch.equal(some, alone[0][:num_tokens])
