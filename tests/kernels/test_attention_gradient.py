"""Gradients of attention over rows that share prompts: those of float64, whatever the threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from groupgrad.kernels.attend import attend, attend_gradient, rows_by_prompt, slot_spans, span_table
from groupgrad.scoring.attention_layout import AttentionCall

UNIT = 2.0**-24
"""Largest relative error of one rounding in float32."""

Row = tuple[int, int, int, int]
"""Start, length, and the start and length of the prompt before it, 0 and 0 without one."""


def make_rows(prompts: list[int], rows: list[tuple[int, ...]]) -> tuple[list[Row], int]:
    """Prompts of these lengths, then rows of (prompt or -1, length) in this order; and the number of tokens.

    A third number of a row is how much of its prompt it continues, if not all.
    """
    found: list[Row] = []
    end = 0
    for number, length, *seen in [*((-1, length) for length in prompts), *rows]:
        before, many = (0, 0) if number < 0 else found[number][:2]
        found.append((end, length, before, *(seen or [many])))
        end += length
    return found, end


def by_head(repeat: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """(T, H, D) as (H * repeat, T, D)."""
    return [x.transpose(0, 1).repeat_interleave(repeat, dim=0) for x in tensors]


def row_weights(query: torch.Tensor, key: torch.Tensor, row: Row, call: AttentionCall) -> tuple[torch.Tensor, ...]:
    """The places of the keys that a row may see, and the softmax weights (H, length, keys) of its queries."""
    start, length, before, many = row
    places = torch.cat([torch.arange(before, before + many), torch.arange(start, start + length)])
    scores = call.scale * query[:, start : start + length] @ key[:, places].transpose(1, 2)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    behind = torch.arange(many, many + length)[:, None] - torch.arange(many + length)
    scores = scores.masked_fill((behind < 0) | (behind >= (call.window or many + length)), -torch.inf)
    return places, scores.softmax(-1)


def output_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: list[Row], call: AttentionCall
) -> torch.Tensor:
    """(T, Hq, D), row by row in the type of the inputs (T, H, D)."""
    (query,), (key, value) = by_head(1, query), by_head(query.shape[1] // key.shape[1], key, value)
    parts = []
    for row in rows:
        places, weights = row_weights(query, key, row, call)
        parts.append(weights @ value[:, places])
    return torch.cat(parts, dim=1).transpose(0, 1)


def rounded_amounts(
    inputs: list[torch.Tensor], rows: list[Row], call: AttentionCall, grad: torch.Tensor
) -> list[torch.Tensor]:
    """Sums of the absolute values of all terms in the gradients of queries, keys and values: float32 rounds those.

    A score rounds by its own terms, and so, relatively, does a weight. With a window of one key the gradients of
    queries and keys are zero, and what is computed is the rounding of their terms.
    """
    repeat = inputs[0].shape[1] // inputs[1].shape[1]
    (query, gradient), (key, value) = by_head(1, inputs[0], grad), by_head(repeat, *inputs[1:])
    of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
    for row in rows:
        places, weights = row_weights(query, key, row, call)
        own = slice(row[0], row[0] + row[1])
        score = call.scale * query[:, own].abs() @ key[:, places].abs().transpose(1, 2)
        weights = weights * (1 + score + (weights * score).sum(-1, keepdim=True))
        slope = gradient[:, own].abs() @ value[:, places].abs().transpose(1, 2)
        slope = weights * (slope + (weights * slope).sum(-1, keepdim=True))
        of_query[:, own] += call.scale * slope @ key[:, places].abs()
        of_key[:, places] += call.scale * slope.transpose(1, 2) @ query[:, own].abs()
        of_value[:, places] += weights.transpose(1, 2) @ gradient[:, own].abs()
    summed = (x.unflatten(0, (-1, repeat)).sum(1) for x in (of_key, of_value))
    return [x.transpose(0, 1) for x in (of_query, *summed)]


def computed(
    kernels: ctypes.CDLL, inputs: list[torch.Tensor], rows: list[Row], call: AttentionCall, grad: torch.Tensor
) -> list[torch.Tensor]:
    spans = torch.tensor([(start, length, 0, many, before, start) for start, length, before, many in rows])
    query, *key_value = inputs
    keys, values = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in key_value)
    addresses = slot_spans(span_table(spans), (keys, values), (keys, values))
    totals = torch.full((*query.shape[:2], 2), torch.nan)
    output = attend(kernels, query.transpose(0, 1), addresses, keys.shape[1], call, totals)
    return attend_gradient(kernels, [*inputs, output, grad, totals], rows_by_prompt(spans), call)


MIXED = make_rows([13, 1, 61], [(0, 5), (2, 40), (0, 0), (1, 17), (-1, 90), (0, 23), (2, 1), (-1, 1), (1, 8), (2, 70)])
"""Rows of several prompts in no order, one without tokens, and rows without a prompt."""

PREFIXES = make_rows([13, 61], [(1, 9, 20), (0, 5), (1, 40), (1, 1, 60), (1, 70, 1), (0, 23, 12), (1, 8, 20)])
"""Rows that continue different parts of two prompts, in no order."""


@pytest.mark.parametrize(("repeat", "width"), [(1, 8), (2, 16), (3, 20), (4, 64), (1, 33)])
@pytest.mark.parametrize("window", [None, 1, 6, 30])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("layout", [MIXED, PREFIXES], ids=["mixed", "prefixes"])
def test_gradients_are_those_of_float64(
    layout: tuple[list[Row], int],
    repeat: int,
    width: int,
    window: int | None,
    softcap: float | None,
    kernels: ctypes.CDLL,
    threads: Callable[[int], None],
):
    torch.manual_seed(width + (window or 0))
    rows, num_tokens = layout
    inputs = [torch.randn(num_tokens, heads, width) for heads in (2 * repeat, 2, 2)]
    grad, call = torch.randn(num_tokens, 2 * repeat, width), AttentionCall(0, width**-0.5, softcap, window)
    leaves = [x.double().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(output_of(*leaves, rows, call), leaves, grad.double())  # pyright: ignore
    threads(1)
    found = computed(kernels, inputs, rows, call, grad)
    amounts = rounded_amounts([x.double() for x in inputs], rows, call, grad.double())
    for gradient, want, amount, times in zip(found, wanted, amounts, (2, 2, 4)):
        assert bool(((gradient - want).abs() <= times * UNIT * amount).all())
    threads(3)
    again = computed(kernels, inputs, rows, call, grad)
    assert all(map(torch.equal, found, again)), "threads change no bit"


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize(
    ("prompts", "rows"),
    [
        ([700], [(0, 1100), (0, 0), (-1, 3)]),
        ([1300], [(0, 70), (0, 1)]),
        ([512], [(0, 512)] * 2),  # a piece ends with a row
        ([], [(-1, 0), (-1, 800)]),
        ([900], [(0, 300, 20), (0, 500), (0, 200, 899), (0, 700, 300)]),
    ],
)
def test_pieces_of_long_rows_are_added_in_order(
    prompts: list[int],
    rows: list[tuple[int, ...]],
    window: int | None,
    kernels: ctypes.CDLL,
    threads: Callable[[int], None],
):
    torch.manual_seed(len(rows))
    spans, num_tokens = make_rows(prompts, rows)
    inputs = [torch.randn(num_tokens, heads, 8) for heads in (4, 1, 1)]
    grad, call = torch.randn(num_tokens, 4, 8), AttentionCall(0, 0.4, None, window)
    leaves = [x.double().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(output_of(*leaves, spans, call), leaves, grad.double())  # pyright: ignore
    threads(1)
    found = computed(kernels, inputs, spans, call, grad)
    for gradient, want in zip(found, wanted):
        torch.testing.assert_close(gradient.double(), want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))
    for some in (2, 7):  # seven wait for each other in one head
        threads(some)
        for _ in range(2):
            assert all(map(torch.equal, found, computed(kernels, inputs, spans, call, grad)))


def test_rows_of_a_prompt_follow_it_those_that_share_most_first():
    rows = torch.tensor(
        [(9, 4, 0, 0, 0, 9), (23, 2, 0, 5, 0, 23), (13, 7, 0, 9, 0, 13), (0, 9, 0, 0, 0, 0), (20, 3, 0, 4, 9, 20)]
    )
    found, bounds = rows_by_prompt(rows)
    assert found.tolist() == [[0, 9, 0, 0], [13, 7, 0, 9], [23, 2, 0, 5], [9, 4, 0, 0], [20, 3, 9, 4]]
    assert bounds.tolist() == [0, 3, 5]
