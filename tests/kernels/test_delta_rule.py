"""The gated delta rule and Mamba-2 by the compiled kernels against a float64 loop over the tokens of each row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch.nn import functional as F

from groupgrad.kernels.delta_rule import gated_delta_rule, mamba2, state_rows

Group = tuple[int, list[int]]
"""Length of a prompt, 0 without one, and the lengths of its rows."""
Memory = Literal["channels", "tokens", "apart"]
"""Queries, keys and values as parts of (channels, T) or (T, channels), or each a tensor of its own."""
MEMORIES: tuple[Memory, ...] = ("channels", "tokens", "apart")
Sizes = tuple[int, int, int, int]
"""Heads, heads of the keys, key width, value width."""
States = tuple[list[int], list[int]]
"""First places of rows that begin with given states, and of those whose final states are wanted."""

MIXED: list[Group] = [(40, [3, 70, 33, 1]), (1, [150]), (64, []), (0, [45]), (33, [128, 64])]
STATES: States = ([0, 147, 298, 362], [113, 0, 407, 298, 568])
"""Rows of `MIXED`."""


def spans_of(groups: list[Group]) -> tuple[torch.Tensor, int]:
    """Spans for `state_rows`, and the number of tokens."""
    spans, end = [], 0
    for prompt, rows in groups:
        start = end
        for length, before in [(prompt, 0), *((length, prompt) for length in rows)]:
            if length:
                spans.append((end, length, 0, before, start if before else 0, end))
            end += length
    return torch.tensor(spans), end


def by_tokens(
    groups: list[Group], vectors: list[torch.Tensor], norm: bool, given: dict[int, torch.Tensor] | None = None
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """(T, H, Dv) outputs, one token after the other, and the final states of rows by their first places.

    `vectors` are query, key, value, log decay and strength (Mamba-2 has none), `given` states that rows begin with, by
    their first places.
    """
    query, key, value, decay, *strength = vectors
    if norm:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(value.shape[1] // x.shape[1], 1)[..., None] for x in (query, key))
    outputs, place = [], 0
    ends: dict[int, torch.Tensor] = {}

    def advance(state: torch.Tensor, length: int) -> torch.Tensor:
        nonlocal place
        first, state = place, state if given is None else given.get(place, state)
        for t in range(place, place + length):
            state = decay[t].exp()[:, None, None] * state
            added = value[t][:, None]
            for factor in strength:
                added = factor[t][:, None, None] * (added - key[t].mT @ state)
            state = state + key[t] @ added
            outputs.append((query[t].mT @ state).squeeze(1) * (query.shape[2] ** -0.5 if strength else 1.0))
        place += length
        if length:
            ends[first] = state
        return state

    for prompt, rows in groups:
        state = advance(value.new_zeros(value.shape[1], key.shape[2], value.shape[2]), prompt)
        for length in rows:
            advance(state, length)
    return torch.stack(outputs), ends


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
    states: States = ([], []),
) -> tuple[torch.Tensor, ...]:
    """The outputs, the final states, and the gradients of the inputs: (T, channels), log decay, strength, and initial
    states if there are such. Without a strength Mamba-2 is computed."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    query, key, value = parts_of(memory, leaves[0], sizes)
    rows = state_rows(spans_of(groups)[0], *states)
    decay, strength, initial = named(leaves)
    if strength is None:
        results = mamba2(kernels, rows, (query, key, value), decay, initial)
    else:
        results = gated_delta_rule(kernels, rows, (query, key, value), decay, strength, norm, initial)
    total = sum((result * slopes(result)).sum() for result in results)
    return *(result.detach() for result in results), *torch.autograd.grad(total, leaves)  # pyright: ignore


def named(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log decay, strength and initial states, of which the latter two may be missing."""
    strength, initial = (next((x for x in inputs[2:] if x.dim() == dim), None) for dim in (2, 4))
    return inputs[1], strength, initial


def slopes(output: torch.Tensor) -> torch.Tensor:
    """The gradient of outputs or states."""
    return torch.linspace(-3, 3, output.numel(), dtype=output.dtype).sin().view_as(output)


def expected(
    groups: list[Group],
    inputs: list[torch.Tensor],
    sizes: Sizes,
    norm: bool = True,
    states: States = ([], []),
) -> tuple[torch.Tensor, ...]:
    """The results of `computed`, in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    decay, strength, initial = named(leaves)
    given = dict(zip(states[0], () if initial is None else initial))
    vectors = [*parts_of("apart", leaves[0], sizes), decay, *([] if strength is None else [strength])]
    output, ends = by_tokens(groups, vectors, norm, given)
    heads, _, key_width, value_width = sizes
    finals = torch.stack([output.new_zeros(heads, key_width, value_width), *(ends[start] for start in states[1])])[1:]
    results = output, finals
    total = sum((result * slopes(result.float()).double()).sum() for result in results)
    return *(result.detach() for result in results), *torch.autograd.grad(total, leaves)  # pyright: ignore


def random_inputs(groups: list[Group], sizes: Sizes) -> list[torch.Tensor]:
    (_, num_tokens), (heads, key_heads, key_width, value_width) = spans_of(groups), sizes
    torch.manual_seed(key_width)
    source = torch.randn(num_tokens, 2 * key_heads * key_width + heads * value_width)
    return [source, -torch.rand(num_tokens, heads), torch.rand(num_tokens, heads)]


def random_states(number: int, sizes: Sizes) -> torch.Tensor:
    heads, _, key_width, value_width = sizes
    return torch.randn(number, heads, key_width, value_width)


SIZES: list[Any] = [(2, 2, 8, 8), (4, 2, 16, 24), (3, 1, 33, 20)]
"""Heads, heads of keys, and widths of keys and values."""
NAMES = ("output", "final states", "vectors", "decay", "strength", "initial states")


def assert_all_close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for name, value, want in zip(NAMES, found, wanted, strict=False):
        assert_close(value, want, name)


def assert_close(found: torch.Tensor, want: torch.Tensor, name: str) -> None:
    scale = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=2e-6 * scale, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("sizes", [*SIZES, pytest.param((1, 1, 128, 128), marks=pytest.mark.slow)], ids=str)
def test_outputs_and_gradients_are_those_of_the_tokens_in_turn(sizes: Sizes, kernels: ctypes.CDLL) -> None:
    inputs = random_inputs(MIXED, sizes)
    wanted = expected(MIXED, inputs, sizes)
    for memory in MEMORIES:
        assert_all_close(computed(kernels, MIXED, inputs, sizes, memory), wanted)


def test_vectors_of_any_length_strengths_of_zero_and_strong_decays(kernels: ctypes.CDLL) -> None:
    sizes = (2, 1, 12, 7)
    inputs = random_inputs(MIXED, sizes)
    inputs[0] *= 12**-0.5
    inputs[1] *= torch.tensor([0.0, 200.0])  # nothing is forgotten, or everything
    inputs[2][::3] = 0
    assert_all_close(computed(kernels, MIXED, inputs, sizes, norm=False), expected(MIXED, inputs, sizes, norm=False))


@pytest.mark.parametrize("is_mamba2", [False, True])
def test_no_number_depends_on_threads_or_on_other_rows(
    is_mamba2: bool, kernels: ctypes.CDLL, threads: Callable[[int], None]
) -> None:
    sizes, norm = (4, 2, 16, 16), not is_mamba2
    vectors = random_inputs(MIXED, sizes)[: 2 if is_mamba2 else 3]
    inputs = [*vectors, random_states(4, sizes)]
    threads(1)
    alone = computed(kernels, MIXED, inputs, sizes, norm=norm, states=STATES)
    threads(3)
    every = computed(kernels, MIXED, inputs, sizes, norm=norm, states=STATES)
    assert all(map(torch.equal, every, alone))
    first = MIXED[:1]
    (_, num_tokens) = spans_of(first)
    cut = [*(x[:num_tokens] for x in vectors), inputs[-1][:1]]
    some = computed(kernels, first, cut, sizes, norm=norm, states=([0], [0]))
    assert torch.equal(some[0], every[0][:num_tokens]) and torch.equal(some[1][0], every[1][1])


@pytest.mark.parametrize("sizes", [(2, 2, 8, 8), (4, 2, 16, 24), (3, 1, 33, 20)], ids=str)
def test_rows_begin_with_given_states_and_leave_final_ones(sizes: Sizes, kernels: ctypes.CDLL) -> None:
    """Given to prompts and to rows without a prompt, left by prompts, by rows behind one, and by others."""
    inputs = [*random_inputs(MIXED, sizes), random_states(4, sizes)]
    inputs[1] *= 0.1  # so that states still count at the rows' ends
    assert_all_close(
        computed(kernels, MIXED, inputs, sizes, states=STATES), expected(MIXED, inputs, sizes, states=STATES)
    )


@pytest.mark.parametrize("sizes", [*SIZES, pytest.param((2, 1, 128, 64), marks=pytest.mark.slow)], ids=str)
def test_mamba2_is_that_of_the_tokens_in_turn(sizes: Sizes, kernels: ctypes.CDLL) -> None:
    source, decay, _ = random_inputs(MIXED, sizes)
    decay[::2] = (decay[::2] + 0.9).clamp(max=0) * 0.1  # nothing is forgotten of some tokens
    inputs = [source * sizes[2] ** -0.25, decay, random_states(4, sizes)]
    wanted = expected(MIXED, inputs, sizes, norm=False, states=STATES)
    for memory in MEMORIES:
        found = computed(kernels, MIXED, inputs, sizes, memory, norm=False, states=STATES)
        for name, value, want in zip(("output", "final states", "vectors", "decay", "initial states"), found, wanted):
            assert_close(value, want, f"{name}, {memory}")


@pytest.mark.parametrize("wanted", ["output", "final states"])
def test_states_have_gradients_if_one_result_has_none(wanted: str, kernels: ctypes.CDLL) -> None:
    groups: list[Group] = [(70, [3])]
    sizes = (2, 1, 64, 8)  # as many channels as tokens, so that what was given is not overwritten
    inputs = [*random_inputs(groups, sizes), random_states(1, sizes)]
    inputs[1] *= 0.1
    rows, found = state_rows(spans_of(groups)[0], [0], [70, 0]), []
    for is_exact in (False, True):
        leaves = [(x.double() if is_exact else x.clone()).requires_grad_() for x in inputs]
        vectors = parts_of("apart", leaves[0], sizes)
        if is_exact:
            output, ends = by_tokens(groups, [*vectors, *leaves[1:3]], True, {0: leaves[3][0]})  # pyright: ignore
            finals = torch.stack([ends[70], ends[0]])
        else:
            output, finals = gated_delta_rule(kernels, rows, tuple(vectors), *leaves[1:3], True, leaves[3])  # pyright: ignore
        result = output if wanted == "output" else finals
        total = (result * slopes(result.float()).to(result.dtype)).sum()
        found.append(torch.autograd.grad(total, leaves, materialize_grads=True))
    for name, value, want in zip(NAMES[2:], *found):
        assert_close(value, want, name)


def test_a_row_in_parts_has_the_bits_of_the_whole_row(kernels: ctypes.CDLL) -> None:
    """Parts of whole chunks, each from the state that the one before has left, and their gradients."""
    sizes, lengths = (4, 2, 20, 12), [128, 64, 192, 5]
    groups: list[Group] = [(0, [sum(lengths)])]
    inputs = random_inputs(groups, sizes)
    whole = computed(kernels, groups, inputs, sizes)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs, state = [], None
    for number, (source, decay, strength) in enumerate(zip(*(x.split(lengths) for x in leaves))):
        spans, _ = spans_of([(0, [lengths[number]])])
        rows = state_rows(spans, [] if state is None else [0], [0] if number < 3 else [])
        query, key, value = parts_of("channels", source, sizes)
        output, state = gated_delta_rule(kernels, rows, (query, key, value), decay, strength, True, state)
        outputs.append(output)
    output = torch.cat(outputs)
    assert torch.equal(output, whole[0])
    gradients = torch.autograd.grad((output * slopes(output)).sum(), leaves)
    assert all(map(torch.equal, gradients, whole[2:]))


def test_parts_that_leave_out_or_repeat_numbers_keep_their_own_gradients(kernels: ctypes.CDLL) -> None:
    source = torch.randn(9, 48, requires_grad=True)
    whole = F.silu(source)
    shared, value = whole[:, 8:16].unflatten(-1, (1, 8)), whole[:, 16:].unflatten(-1, (2, 16))
    decay, strength = -torch.rand(9, 2), torch.rand(9, 2)
    groups: list[Group] = [(0, [9])]
    rows = state_rows(spans_of(groups)[0])
    output, _ = gated_delta_rule(kernels, rows, (shared, shared, value), decay, strength, True)
    (found,) = torch.autograd.grad((output * slopes(output)).sum(), source)
    wide = source.detach().double().requires_grad_()
    whole = F.silu(wide)
    shared, value = whole[:, 8:16].unflatten(-1, (1, 8)), whole[:, 16:].unflatten(-1, (2, 16))
    wanted, _ = by_tokens(groups, [shared, shared, value, decay.double(), strength.double()], True)
    (want,) = torch.autograd.grad((wanted * slopes(output).double()).sum(), wide)
    assert_close(found, want, "source")
