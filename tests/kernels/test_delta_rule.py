"""The gated delta rule by the compiled kernels against a float64 loop over the tokens of each row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch.nn import functional as F

from groupgrad.kernels.attend import rows_by_prompt
from groupgrad.kernels.delta_rule import gated_delta_rule

Group = tuple[int, list[int]]
"""Length of a prompt, 0 without one, and the lengths of its rows."""
Memory = Literal["channels", "tokens", "apart"]
"""Queries, keys and values as parts of (channels, T) or (T, channels), or each a tensor of its own."""
Sizes = tuple[int, int, int, int]
"""Heads, heads of the keys, key width, value width."""

MIXED: list[Group] = [(40, [3, 70, 33, 1]), (1, [150]), (64, []), (0, [45]), (33, [128, 64])]


def spans_of(groups: list[Group]) -> tuple[torch.Tensor, int]:
    """Spans for `rows_by_prompt`, and the number of tokens."""
    spans, end = [], 0
    for prompt, rows in groups:
        start = end
        for length, before in [(prompt, 0), *((length, prompt) for length in rows)]:
            if length:
                spans.append((end, length, 0, before, start if before else 0, end))
            end += length
    return torch.tensor(spans), end


def by_tokens(groups: list[Group], vectors: list[torch.Tensor], norm: bool) -> torch.Tensor:
    """(T, H, Dv) outputs, one token after the other; `vectors` are query, key, value, log decay and strength."""
    query, key, value, decay, strength = vectors
    if norm:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(value.shape[1] // x.shape[1], 1)[..., None] for x in (query, key))
    outputs, place = [], 0

    def advance(state: torch.Tensor, length: int) -> torch.Tensor:
        nonlocal place
        for t in range(place, place + length):
            state = decay[t].exp()[:, None, None] * state
            added = strength[t][:, None, None] * (value[t][:, None] - key[t].mT @ state)
            state = state + key[t] @ added
            outputs.append((query[t].mT @ state).squeeze(1) * query.shape[2] ** -0.5)
        place += length
        return state

    for prompt, rows in groups:
        state = advance(value.new_zeros(value.shape[1], key.shape[2], value.shape[2]), prompt)
        for length in rows:
            advance(state, length)
    return torch.stack(outputs)


def parts_of(memory: Memory, source: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """Query, key and value, differentiable in `source` (T, channels)."""
    heads, key_heads, key_width, value_width = sizes
    widths = [key_heads * key_width, key_heads * key_width, heads * value_width]
    if memory == "apart":
        parts = [x.clone() for x in source.split(widths, dim=-1)]
    else:
        whole = source.T.contiguous().T if memory == "channels" else source * 1
        parts = list(whole.split(widths, dim=-1))
    return [x.unflatten(-1, (n, -1)) for x, n in zip(parts, (key_heads, key_heads, heads))]


def computed(
    kernels: ctypes.CDLL,
    groups: list[Group],
    inputs: list[torch.Tensor],
    sizes: Sizes,
    memory: Memory = "channels",
    norm: bool = True,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The outputs, and the gradients of the inputs: (T, channels), log decay and strength."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    query, key, value = parts_of(memory, leaves[0], sizes)
    rows = rows_by_prompt(spans_of(groups)[0])
    output = gated_delta_rule(kernels, rows, (query, key, value), leaves[1], leaves[2], norm)
    return output.detach(), torch.autograd.grad((output * slopes(output)).sum(), leaves)


def slopes(output: torch.Tensor) -> torch.Tensor:
    """The gradient of the outputs."""
    return torch.linspace(-3, 3, output.numel(), dtype=output.dtype).sin().view_as(output)


def expected(
    groups: list[Group], inputs: list[torch.Tensor], sizes: Sizes, norm: bool = True
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    leaves = [x.double().requires_grad_() for x in inputs]
    output = by_tokens(groups, [*parts_of("apart", leaves[0], sizes), *leaves[1:]], norm)
    return output.detach(), torch.autograd.grad((output * slopes(output.float()).double()).sum(), leaves)


def random_inputs(groups: list[Group], sizes: Sizes) -> list[torch.Tensor]:
    (_, num_tokens), (heads, key_heads, key_width, value_width) = spans_of(groups), sizes
    torch.manual_seed(key_width)
    source = torch.randn(num_tokens, 2 * key_heads * key_width + heads * value_width)
    return [source, -torch.rand(num_tokens, heads), torch.rand(num_tokens, heads)]


def assert_close(found: torch.Tensor, want: torch.Tensor, name: str) -> None:
    scale = float(want.abs().max())
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=2e-6 * scale, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("memory", ["channels", "tokens", "apart"])
@pytest.mark.parametrize("sizes", [(2, 2, 8, 8), (4, 2, 16, 24), (3, 1, 33, 20), (1, 1, 128, 128)], ids=str)
def test_outputs_and_gradients_are_those_of_the_tokens_in_turn(
    memory: Memory, sizes: Sizes, kernels: ctypes.CDLL
) -> None:
    inputs = random_inputs(MIXED, sizes)
    output, gradients = computed(kernels, MIXED, inputs, sizes, memory)
    wanted, of_inputs = expected(MIXED, inputs, sizes)
    assert_close(output, wanted, "output")
    for name, found, want in zip(("vectors", "decay", "strength"), gradients, of_inputs):
        assert_close(found, want, name)


def test_vectors_of_any_length_strengths_of_zero_and_strong_decays(kernels: ctypes.CDLL) -> None:
    sizes = (2, 1, 12, 7)
    inputs = random_inputs(MIXED, sizes)
    inputs[0] *= 12**-0.5
    inputs[1] *= torch.tensor([0.0, 200.0])  # nothing is forgotten, or everything
    inputs[2][::3] = 0
    output, gradients = computed(kernels, MIXED, inputs, sizes, norm=False)
    wanted, of_inputs = expected(MIXED, inputs, sizes, norm=False)
    assert_close(output, wanted, "output")
    for name, found, want in zip(("vectors", "decay", "strength"), gradients, of_inputs):
        assert_close(found, want, name)


def test_no_number_depends_on_threads_or_on_other_rows(kernels: ctypes.CDLL, threads: Callable[[int], None]) -> None:
    sizes = (4, 2, 16, 16)
    inputs = random_inputs(MIXED, sizes)
    threads(1)
    alone = computed(kernels, MIXED, inputs, sizes)
    threads(3)
    output, gradients = computed(kernels, MIXED, inputs, sizes)
    assert torch.equal(output, alone[0]) and all(map(torch.equal, gradients, alone[1]))
    first = MIXED[:1]
    (_, num_tokens) = spans_of(first)
    some, _ = computed(kernels, first, [x[:num_tokens] for x in inputs], sizes)
    assert torch.equal(some, output[:num_tokens])


def test_one_tensor_of_all_parts_gets_its_gradient_at_once(kernels: ctypes.CDLL) -> None:
    sizes, groups = (2, 2, 8, 8), MIXED[:1]
    source, decay, strength = random_inputs(groups, sizes)
    for memory, nodes in (("channels", 1), ("tokens", 1), ("apart", 3)):
        query, key, value = parts_of(memory, source.clone().requires_grad_(), sizes)  # pyright: ignore
        rows = rows_by_prompt(spans_of(groups)[0])
        output = gated_delta_rule(kernels, rows, (query, key, value), decay, strength, True)
        assert sum(node is not None for node, _ in output.grad_fn.next_functions) == nodes  # pyright: ignore


def test_parts_that_leave_out_or_repeat_numbers_keep_their_own_gradients(kernels: ctypes.CDLL) -> None:
    source = torch.randn(9, 48, requires_grad=True)
    whole = F.silu(source)
    shared, value = whole[:, 8:16].unflatten(-1, (1, 8)), whole[:, 16:].unflatten(-1, (2, 16))
    decay, strength = -torch.rand(9, 2), torch.rand(9, 2)
    groups: list[Group] = [(0, [9])]
    output = gated_delta_rule(
        kernels, rows_by_prompt(spans_of(groups)[0]), (shared, shared, value), decay, strength, True
    )
    (found,) = torch.autograd.grad((output * slopes(output)).sum(), source)
    wide = source.detach().double().requires_grad_()
    whole = F.silu(wide)
    shared, value = whole[:, 8:16].unflatten(-1, (1, 8)), whole[:, 16:].unflatten(-1, (2, 16))
    wanted = by_tokens(groups, [shared, shared, value, decay.double(), strength.double()], True)
    (want,) = torch.autograd.grad((wanted * slopes(output).double()).sum(), wide)
    assert_close(found, want, "source")
