"""Attention of many tokens: numbers of float64, and for each query the same bits whatever is computed beside it."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from groupgrad.kernels.attend import attend, slot_spans, span_table
from groupgrad.scoring.attention_layout import AttentionCall

UNIT = 2.0**-24
"""Largest relative error of one rounding in float32."""


@dataclass
class Stored:
    """Keys and values of a sequence, each (Hkv, places, D)."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class Span:
    """Query tokens from `start` on, behind `offset` tokens of their sequence and its prompt."""

    start: int
    length: int
    own: Stored
    offset: int = 0
    prompt: Stored | None = None
    prompt_length: int = 0

    def record(self) -> torch.Tensor:
        """(10,) for the kernel."""
        numbers = (self.start, self.length, self.offset, self.prompt_length, 0, 0)
        prompt, own = ((x.keys[None], x.values[None]) for x in (self.prompt or self.own, self.own))
        return slot_spans(span_table(torch.tensor([numbers])), prompt, own)[0]


@dataclass
class Heads:
    """Numbers of heads, and their width."""

    of_keys: int
    repeat: int
    width: int

    def stored(self, places: int, spare: int = 3) -> Stored:
        """Random keys and values; NaN behind the places of each head."""
        keys, values = torch.randn(2, self.of_keys, places + spare, self.width)
        keys[:, places:] = values[:, places:] = torch.nan
        return Stored(keys, values)

    def queries(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(self.of_keys * self.repeat, num_tokens, self.width)


def make_call(heads: Heads, window: int | None = None, **changes: object) -> AttentionCall:
    scale = heads.width**-0.5
    return replace(AttentionCall(layer=0, scale=scale, window=window, softcap=None, sinks=None, dropout=0.0), **changes)


def computed(kernels: ctypes.CDLL, query: torch.Tensor, spans: Sequence[Span], call: AttentionCall) -> torch.Tensor:
    records = torch.stack([span.record() for span in spans])
    return attend(kernels, query, records, len(spans[0].own.keys), call)


def assert_exact(found: torch.Tensor, query: torch.Tensor, spans: Sequence[Span], call: AttentionCall) -> None:
    """`found` is what float64 gives a span at a time, but for rounding.

    A score rounds by its own terms, and so, relatively, does a weight; the output rounds by the weights' terms. Each of
    these sums is off by some units of all its terms' absolute values: roundings have random signs.
    """
    output = torch.full((query.shape[1], query.shape[0], query.shape[2]), torch.nan, dtype=torch.float64)
    amount = output.clone()
    for span in (span for span in spans if span.length):
        num_keys, repeat = span.prompt_length + span.offset + span.length, len(query) // len(span.own.keys)
        parts = [(span.prompt, span.prompt_length), (span.own, span.offset + span.length)]
        keys = torch.cat([x.keys[:, :n] for x, n in parts if x is not None], dim=1).double()
        values = torch.cat([x.values[:, :n] for x, n in parts if x is not None], dim=1).double()
        keys, values = (x.repeat_interleave(repeat, dim=0) for x in (keys, values))
        at = slice(span.start, span.start + span.length)
        scores = call.scale * query[:, at].double() @ keys.transpose(1, 2)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        behind = torch.arange(num_keys - span.length, num_keys)[:, None] - torch.arange(num_keys)
        scores = scores.masked_fill((behind < 0) | (behind >= (call.window or num_keys)), -torch.inf)
        if call.sinks is not None:
            scores = torch.cat([scores, call.sinks.double()[:, None, None].expand(-1, span.length, 1)], dim=2)
        weights, size = scores.softmax(-1), call.scale * query[:, at].abs().double() @ keys.abs().mT
        output[at] = (weights[..., :num_keys] @ values).transpose(0, 1)
        mean = (weights[..., :num_keys] * size).sum(-1, keepdim=True)
        if call.sinks is not None:
            mean += weights[..., num_keys:] * call.sinks.abs()[:, None, None]
        amount[at] = (weights[..., :num_keys] * (1 + size + mean) @ values.abs()).transpose(0, 1)
    assert bool(((found - output).abs() <= 4 * UNIT * amount).all())


def make_spans(heads: Heads, sizes: Sequence[tuple[int, int, int]], prompts: Sequence[int]) -> tuple[list[Span], int]:
    """Consecutive spans of these (prompt or -1, offset, length), and their number of tokens."""
    stored = [heads.stored(length) for length in prompts]
    spans, end = [], 0
    for number, offset, length in sizes:
        prompt, prompt_length = (None, 0) if number < 0 else (stored[number], prompts[number])
        spans.append(Span(end, length, heads.stored(offset + length), offset, prompt, prompt_length))
        end += length
    return spans, end


def random_sizes(seed: int) -> list[tuple[int, int, int]]:
    """A dozen spans behind three prompts or none; some resumed, some of one token, one long."""
    draw = random.Random(seed)
    sizes = [(draw.randrange(-1, 3), draw.choice((0, 0, 1, 17, 40)), draw.choice((1, 2, 5, 16, 23))) for _ in range(11)]
    return [*sizes, (draw.randrange(-1, 3), draw.choice((0, 9)), 70)]


PROMPTS = (1, 13, 61)
KINDS = [(1, 8), (1, 80), (2, 20), (2, 64), (8, 8), (8, 20), (8, 64), (7, 64), (3, 33), (12, 4)]


@pytest.mark.parametrize(("repeat", "width"), KINDS)
@pytest.mark.parametrize("window", [None, 1, 5, 30])
def test_numbers_are_those_of_float64(
    repeat: int, width: int, window: int | None, kernels: ctypes.CDLL, threads: Callable[[int], None]
):
    seed = repeat * 100 + width + (window or 0)
    torch.manual_seed(seed)
    threads(1 + seed % 2)
    heads = Heads(1 + seed % 3, repeat, width)
    spans, num_tokens = make_spans(heads, random_sizes(seed), PROMPTS)
    query, call = 2 * heads.queries(num_tokens), make_call(heads, window)
    assert_exact(computed(kernels, query, spans, call), query, spans, call)


@pytest.mark.parametrize("window", [None, 7])
def test_caps_and_sinks(window: int | None, kernels: ctypes.CDLL):
    torch.manual_seed(0)
    heads = Heads(2, 3, 20)
    spans, num_tokens = make_spans(heads, random_sizes(3), PROMPTS)
    query = 5 * heads.queries(num_tokens)
    sinks = torch.tensor([0.0, 30.0, -200.0, 3.0, -1.0, 9.0])
    plain = computed(kernels, query, spans, make_call(heads, window))
    for changes in ({"softcap": 3.0}, {"softcap": 50.0}, {"sinks": sinks}, {"softcap": 8.0, "sinks": sinks}):
        call = make_call(heads, window, **changes)
        found = computed(kernels, query, spans, call)
        assert_exact(found, query, spans, call)
        assert not torch.allclose(found, plain, atol=1e-3)


def test_sequences_of_many_blocks_of_scores(kernels: ctypes.CDLL):
    torch.manual_seed(0)
    heads = Heads(1, 2, 8)
    for sizes, prompt in (([(0, 2, 3)], 70_000), ([(0, 1, 7), (-1, 3000, 5)], 9000)):
        spans, num_tokens = make_spans(heads, sizes, [prompt])
        query = heads.queries(num_tokens)
        for window in (None, 600):
            call = make_call(heads, window)
            assert_exact(computed(kernels, query, spans, call), query, spans, call)


def cut(span: Span, lengths: Sequence[int]) -> list[Span]:
    """The same tokens as several spans that resume each other."""
    found, done = [], 0
    for length in lengths:
        part = replace(span, start=span.start + done, length=length, offset=span.offset + done)
        found.append(part)
        done += length
    assert done == span.length
    return found


@pytest.mark.parametrize(("repeat", "width"), KINDS)
@pytest.mark.parametrize(("window", "special"), [(None, False), (1, False), (40, True)])
def test_a_query_gets_the_same_bits_whatever_is_computed_with_it(
    repeat: int,
    width: int,
    window: int | None,
    special: bool,
    kernels: ctypes.CDLL,
    threads: Callable[[int], None],
):
    torch.manual_seed(repeat + width)
    heads = Heads(2, repeat, width)
    spans, num_tokens = make_spans(heads, [(0, 0, 150), (-1, 0, 77), (1, 19, 20)], [50, 200])
    changes = {"softcap": 4.0, "sinks": torch.randn(2 * repeat)} if special else {}
    query, call = 3 * heads.queries(num_tokens), make_call(heads, window, **changes)
    threads(1)
    whole = computed(kernels, query, spans, call)
    single = [part for span in spans for part in cut(span, [1] * span.length)]
    assert torch.equal(computed(kernels, query, single, call), whole)
    uneven = [part for span in spans for part in cut(span, [3, span.length - 14, 11])]
    threads(3)
    assert torch.equal(computed(kernels, query, uneven[::-1], call), whole)
    for part in (single[5], uneven[1], uneven[8]):
        alone = replace(part, start=0)
        at = slice(part.start, part.start + part.length)
        assert torch.equal(computed(kernels, query[:, at], [alone], call), whole[at])


def test_keys_may_lie_among_those_of_the_other_tokens(kernels: ctypes.CDLL):
    torch.manual_seed(0)
    heads = Heads(2, 2, 20)
    # Two prompts of 9 and 4 tokens, behind them three rows; the last one continues the second prompt.
    rows = torch.tensor([[0, 9, 0, 0], [9, 4, 5, 0], [13, 7, 0, 9], [20, 1, 0, 9], [21, 30, 9, 4]])
    query, key, value = heads.queries(51), torch.randn(2, 51, 20), torch.randn(2, 51, 20)

    def part(start: int, length: int) -> Stored:
        return Stored(key[:, start : start + length], value[:, start : start + length])

    spans = [
        Span(start, length, part(start, length), 0, part(before, many) if many else None, many)
        for start, length, before, many in rows.tolist()
    ]
    call, (start, length, before, many) = make_call(heads), rows.unbind(1)
    tokens = key.transpose(0, 1), value.transpose(0, 1)
    table = span_table(torch.stack([start, length, torch.zeros_like(start), many, before, start], dim=1))
    found = attend(kernels, query, slot_spans(table, tokens, tokens), 2, call)
    assert torch.equal(found, computed(kernels, query, spans, call))
    assert_exact(found, query, spans, call)


@pytest.mark.parametrize("changes", [{}, {"softcap": 3.0, "window": 7}, {"sinks": torch.randn(4)}])
def test_the_totals_turn_scores_into_weights(changes: dict[str, Any], kernels: ctypes.CDLL):
    torch.manual_seed(0)
    heads = Heads(2, 2, 20)
    spans, num_tokens = make_spans(heads, random_sizes(2), PROMPTS)
    query, call = 2 * heads.queries(num_tokens), make_call(heads, **changes)
    records, totals = torch.stack([span.record() for span in spans]), torch.full((num_tokens, 4, 2), torch.nan)
    found = attend(kernels, query, records, 2, call, totals)
    assert torch.equal(found, computed(kernels, query, spans, call))
    # A value of 1 at the last key alone makes the output that key's weight.
    one = [replace(span, own=Stored(span.own.keys, torch.zeros_like(span.own.values))) for span in spans]
    for span in one:
        span.own.values[:, span.offset + span.length - 1] = 1
        if span.prompt is not None:
            span.prompt = Stored(span.prompt.keys, torch.zeros_like(span.prompt.values))
    weights = computed(kernels, query, one, call)[..., 0]
    for span in spans:
        last, place = span.start + span.length - 1, span.offset + span.length - 1
        keys = span.own.keys[:, place].repeat_interleave(2, dim=0)
        terms = call.scale * query[:, last] * keys
        score = terms.sum(-1)
        score = score if call.softcap is None else call.softcap * torch.tanh(score / call.softcap)
        peak, factor = totals[last].unbind(-1)
        # Both sides sum the score's terms, each of which rounds by a unit, and take an exponential, of some units.
        size = terms.abs().sum(-1) + (score - peak).abs() + 8
        off = ((score - peak).exp() * factor - weights[last]).abs()
        assert bool((off <= 4 * UNIT * size * weights[last]).all())


def test_queries_may_have_any_strides(kernels: ctypes.CDLL):
    torch.manual_seed(0)
    heads = Heads(2, 2, 20)
    spans, num_tokens = make_spans(heads, random_sizes(1), PROMPTS)
    query, call = heads.queries(num_tokens), make_call(heads)
    expected = computed(kernels, query, spans, call)
    by_token = query.transpose(0, 1).contiguous().transpose(0, 1)
    backwards = query.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    among_others = torch.randn(4, num_tokens, 60)[..., 20:40].copy_(query)
    for other in (by_token, backwards, among_others):
        assert not other.is_contiguous()
        assert torch.equal(computed(kernels, other, spans, call), expected)


def test_rows_without_tokens_of_their_own(kernels: ctypes.CDLL):
    torch.manual_seed(0)
    heads = Heads(2, 1, 8)
    spans, num_tokens = make_spans(heads, [(0, 0, 0), (0, 0, 4), (-1, 0, 0), (1, 3, 0), (0, 2, 5), (1, 0, 0)], [6, 9])
    query, call = heads.queries(num_tokens), make_call(heads)
    found = computed(kernels, query, spans, call)
    assert_exact(found, query, spans, call)


def test_keys_that_are_no_numbers_stay_in_their_rows(kernels: ctypes.CDLL):
    torch.manual_seed(0)
    heads = Heads(1, 2, 20)
    spans, num_tokens = make_spans(heads, [(-1, 0, 5), (0, 0, 3)], [6])
    query, call = heads.queries(num_tokens), make_call(heads)
    plain = computed(kernels, query, spans, call)
    spans[0].own.keys[0, 0, 3] = torch.nan
    found = computed(kernels, query, spans, call)
    assert found[:5].isnan().all() and torch.equal(found[5:], plain[5:])


def test_scores_far_apart(kernels: ctypes.CDLL):
    heads = Heads(1, 1, 8)
    spans, _ = make_spans(heads, [(0, 0, 40)], [30])
    query, call = 1000 * heads.queries(40), make_call(heads)
    found = computed(kernels, query, spans, call)
    assert found.isfinite().all()
    assert_exact(found, query, spans, call)
