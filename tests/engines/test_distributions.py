"""Both engines sample from the exact distributions that temperature, top-k, top-p and min-p define."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.transformers import TransformersEngine

NUM_DRAWS = 4000
FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (0.7, 4, 1.0, 0.0),
    (0.7, 0, 0.8, 0.0),
    (1.3, 0, 1.0, 0.3),
    (0.9, 6, 0.9, 0.1),
]
"""(temperature, top_k, top_p, min_p)."""


def filtered(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The distribution behind top-k, top-p and min-p in this order, renormalised each time."""
    p = (logits.double() / temperature).softmax(-1)
    if top_k:
        p = torch.where(p >= p.topk(top_k).values[-1], p, 0.0)
        p = p / p.sum()
    if top_p < 1.0:
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        p = p.index_fill(0, order[before >= top_p], 0.0)
        p = p / p.sum()
    if min_p:
        p = torch.where(p >= min_p * p.max(), p, 0.0)
        p = p / p.sum()
    return p


@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_first_two_tokens_follow_the_exact_distribution(engine, temperature, top_k, top_p, min_p, build):
    """Chi-square against the product of two filtered distributions; a first EOS is a completion of one token."""
    model = build("qwen3", vocab_size=8, num_hidden_layers=1)
    prompt = [3, 4, 5]

    def after(ids: list[int]) -> list[float]:
        logits = model(torch.tensor([ids])).logits[0, -1].detach()
        return filtered(logits, temperature, top_k, top_p, min_p).tolist()

    expected: dict[tuple[int, ...], float] = {}
    for a, p in enumerate(after(prompt)):
        for b, q in enumerate(after([*prompt, a]) if a != 1 else [1.0]):
            expected[(a, b) if a != 1 else (a,)] = p * q
    engines = {"native": NativeEngine(model), "transformers": TransformersEngine(model, max_rows=NUM_DRAWS)}
    options = SamplingOptions(
        max_new_tokens=2, eos_ids=(1,), pad_id=0, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p or None
    )
    samples = engines[engine].sample([Request(prompt, seed, 2) for seed in range(NUM_DRAWS)], options)
    counts = Counter(tuple(s.ids) for s in samples)
    assert all(expected[ids] > 0 for ids in counts), "no filtered token is sampled"
    chi_square = sum((counts[ids] - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for ids, p in expected.items() if p > 0)
    freedom = sum(p > 0 for p in expected.values()) - 1
    assert freedom >= 3
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
