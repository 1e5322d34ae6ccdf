"""Attention over tokens that are cut over ranks: its results and gradients are those of dense attention in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from forked_ranks import FakeGroup, on_ranks

from groupgrad import dist
from groupgrad.batch import Batch
from groupgrad.integrations.sharding import ring_attention
from groupgrad.integrations.sharding.context_split import cut_over_ranks
from groupgrad.scoring.attention import AttentionCall
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.forward import build_batch
from groupgrad.scoring.layout import flat_layout

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 6, 5
SEEDS = range(5)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "narrow window": {"window": 1},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": True},
    "all": {"window": 5, "softcap": 1.1, "sinks": True},
}


def random_batch(seed: int) -> Batch:
    """Prompts of unlike lengths; seed 0 has fewer tokens than the chunks of four ranks, seed 3 a prompt without any."""
    stream = torch.Generator().manual_seed(seed)
    if seed == 0:
        return build_batch([[1]], [0], [[2, 3]])

    def lengths(most: int, count: int) -> list[int]:
        return torch.randint(0, most, (count,), generator=stream).tolist()

    prompts = [[1] * (length + (seed != 3)) for length in lengths(20, 3)]
    if seed == 3:
        prompts[1] = []
    rows = [[1] * length for length in lengths(25, 7)]
    return build_batch(prompts, [0, 1, 1, 0, 2, 0, 1], rows)


def dense(spans: list[TokenSpan], tensors: dict[str, torch.Tensor], call: AttentionCall) -> torch.Tensor:
    """(T, Hq, E) by the definition: every score of every token, masked."""
    places = [(number, s.position + i) for number, s in enumerate(spans) for i in range(s.length)]
    number = torch.tensor([place[0] for place in places])
    position = torch.tensor([place[1] for place in places])
    starts = {s.start: index for index, s in enumerate(spans) if s.length}
    prompt = torch.tensor([starts[s.shared.start] if s.shared is not None and s.shared.length else -1 for s in spans])[
        number
    ]
    begin = torch.tensor([s.shared.length if s.shared is not None else 0 for s in spans])[number]
    visible = (number[:, None] == number) | ((prompt[:, None] == number) & (position < begin[:, None]))
    distance = position[:, None] - position
    visible &= distance >= 0
    if call.window is not None:
        visible &= distance < call.window
    key, value = (tensors[name].repeat_interleave(HEADS // KEY_HEADS, 0) for name in ("key", "value"))
    scores = call.scale * tensors["query"] @ key.transpose(1, 2)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if "sinks" in tensors:
        scores = torch.cat([scores, tensors["sinks"].view(-1, 1, 1).expand(-1, len(places), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(places)]
    return (weights @ value).transpose(0, 1)


def made(seed: int, kind: str, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor, AttentionCall]:
    """A layout whose token ids count from 1 on, its queries, keys and values, a gradient, and options of a layer.

    Rows share their prompts, but for seed 2; with seed 4 they share parts of one prompt.
    """
    inputs = flat_layout(random_batch(seed), shared_prompts=seed != 2, shared_prefixes=seed == 4)
    num_tokens = len(inputs.ids)
    stream = torch.Generator().manual_seed(100 + seed)
    shapes = {"query": (HEADS, WIDTH), "key": (KEY_HEADS, WIDTH), "value": (KEY_HEADS, VALUE_WIDTH)}
    tensors = {
        name: torch.randn(heads, num_tokens, width, generator=stream, dtype=torch.float64).to(dtype)
        for name, (heads, width) in shapes.items()
    }
    options = dict(KINDS[kind])
    if options.pop("sinks", False):
        tensors["sinks"] = torch.randn(HEADS, generator=stream, dtype=torch.float64).to(dtype)
    gradient = torch.randn(num_tokens, HEADS, VALUE_WIDTH, generator=stream, dtype=torch.float64).to(dtype)
    for tensor in tensors.values():
        tensor.requires_grad_()
    call = AttentionCall(0, scale=0.7, **options)
    return replace(inputs, ids=torch.arange(num_tokens) + 1), tensors, gradient, call


def on_ring(group: dist.RankGroup, seed: int, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """This rank's outputs with their places, and its share of each gradient."""
    inputs, tensors, gradient, call = made(seed, kind, dtype)
    part = cut_over_ranks(inputs, torch.zeros(0, dtype=torch.int64), group)
    is_filling = part.inputs.ids == 0
    places = (part.inputs.ids - 1).clamp(min=0)
    sinks = tensors.get("sinks")
    assert part.inputs.attention is not None
    output = part.inputs.attention.attend(
        *(tensors[name][:, places] for name in ("query", "key", "value")), replace(call, sinks=sinks)
    )
    assert output.dtype == dtype and output.shape == (len(places), HEADS, VALUE_WIDTH)
    (output * gradient[places] * ~is_filling[:, None, None]).sum().backward()
    grads = {name: tensor.grad for name, tensor in tensors.items()}
    return {"places": places[~is_filling], "output": output.detach()[~is_filling], "grads": grads}


@pytest.mark.quick("2")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_dense_attention(num_ranks, tmp_path, monkeypatch):
    """Random ragged layouts in tiles of a few tokens; every rank has queries, keys and values of its tokens alone."""
    monkeypatch.setattr(ring_attention, "QUERY_TILE", 5)
    monkeypatch.setattr(ring_attention, "KEY_TILE", 7)
    cases = [(seed, kind, torch.float64) for seed in SEEDS for kind in KINDS]
    cases += [(1, kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)]

    def action(rank: int) -> list[dict[str, Any]]:
        group = dist.consecutive_groups(num_ranks, timeout_s=60)
        return [on_ring(group, *case) for case in cases]

    results = on_ranks(action, tmp_path, num_ranks)
    for number, (seed, kind, dtype) in enumerate(cases):
        inputs, given, gradient, call = made(seed, kind, dtype)
        tensors = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
        expected = dense(inputs.spans, tensors, call)
        (expected * gradient).sum().backward()
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
        ranks = [result[number] for result in results]
        places = torch.cat([rank["places"] for rank in ranks])
        assert sorted(places.tolist()) == list(range(len(inputs.ids)))
        output = torch.cat([rank["output"] for rank in ranks])
        torch.testing.assert_close(output.double(), expected.detach()[places], rtol=tolerance, atol=tolerance)
        for name, tensor in tensors.items():
            found = torch.stack([rank["grads"][name] for rank in ranks]).sum(0)
            torch.testing.assert_close(found.double(), tensor.grad, rtol=tolerance, atol=5 * tolerance)


def test_ranks_have_about_equal_work():
    """One long row: each of eight ranks computes its share of the scores to 2 %, and holds its share of the tokens."""
    inputs = flat_layout(build_batch([[1] * 100], [0], [[1] * 9900]))
    costs = []
    for index in range(8):
        part = cut_over_ranks(inputs, torch.zeros(0, dtype=torch.int64), FakeGroup(index, 8))  # pyright: ignore
        attention: Any = part.inputs.attention
        tiles = [tile for rank in range(8) for tile in attention.tiles(rank, None)]
        costs.append(sum((t.queries.stop - t.queries.start) * (t.keys.stop - t.keys.start) for t in tiles))
        assert len(part.inputs.ids) == pytest.approx(10_000 / 8, abs=2)
    assert max(costs) < 1.02 * sum(costs) / 8
    assert sum(costs) < 1.1 * 10_000**2 / 2
