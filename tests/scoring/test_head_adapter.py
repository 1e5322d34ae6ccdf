"""A low-rank adapter on the tiled head: scores and gradients equal those of whole logits in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from groupgrad.batch import TokenScores
from groupgrad.scoring.tiled_head import (
    LogitTransform,
    LowRank,
    OutputHead,
    PrecomputedGradient,
    Tiles,
    scores_with_gradient,
    tiled_scores,
)

NUM_TOKENS, VOCAB, WIDTH, RANK = 13, 37, 8, 3
Parts = dict[str, torch.Tensor]


def make_parts(trained: str = "hidden states second", dtype: torch.dtype = torch.float32) -> Parts:
    stream = torch.Generator().manual_seed(0)
    shapes = {"hidden": (NUM_TOKENS, WIDTH), "weight": (VOCAB, WIDTH), "bias": (VOCAB,)}
    shapes |= {"states": (NUM_TOKENS, RANK), "second": (VOCAB, RANK)}
    parts = {name: torch.randn(shape, generator=stream).to(dtype) for name, shape in shapes.items()}
    for name in trained.split():
        parts[name].requires_grad_()
    return parts


TOKENS = torch.arange(NUM_TOKENS) * 5 % VOCAB
OF_LOGPROBS = torch.linspace(-1.5, 1.0, NUM_TOKENS)
OF_ENTROPY = torch.linspace(0.5, -0.5, NUM_TOKENS)


def whole(parts: Parts, transform: LogitTransform) -> TokenScores:
    logits = transform.scale * (
        parts["hidden"] @ parts["weight"].T + parts["states"] @ parts["second"].T + parts["bias"]
    )
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logprobs = torch.log_softmax(logits / 0.7, -1)
    return TokenScores(logprobs.gather(1, TOKENS[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1))


def tiled(
    parts: Parts, transform: LogitTransform, precomputed: PrecomputedGradient | None = None, entropy: bool = False
) -> TokenScores:
    arguments: dict[str, Any] = {"transform": transform, "temperature": 0.7, "tiles": Tiles(4, 10)}
    head = OutputHead(parts["weight"], parts["bias"], LowRank(parts["states"], parts["second"]))
    if precomputed is not None:
        return scores_with_gradient(parts["hidden"], head, TOKENS, precomputed, **arguments)
    return tiled_scores(parts["hidden"], head, TOKENS, entropy_gradient=entropy, **arguments)


def gradients(scores: TokenScores, parts: Parts, entropy: bool) -> Parts:
    loss = (scores.logprobs * OF_LOGPROBS).sum()
    if entropy:
        loss = loss + (scores.entropy * OF_ENTROPY).sum()
    wanted = {name: x for name, x in parts.items() if x.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()))))


def assert_same(actual: TokenScores, parts: Parts, transform: LogitTransform, *, entropy: bool = False) -> None:
    doubles = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in parts.items()}
    expected = whole(doubles, transform)
    torch.testing.assert_close(actual.logprobs.double(), expected.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=0, atol=1e-5)
    right = gradients(expected, doubles, entropy)
    for name, value in gradients(actual, parts, entropy).items():
        assert value.dtype == parts[name].dtype
        torch.testing.assert_close(value.double(), right[name], rtol=1e-4, atol=1e-5)


TRAINED = ["hidden states second", "second", "hidden states", "hidden weight bias states second", "hidden weight bias"]


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(scale=0.5, softcap=3.0)])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("trained", TRAINED)
def test_scores_and_gradients(trained: str, entropy: bool, transform: LogitTransform):
    parts = make_parts(trained)
    assert_same(tiled(parts, transform, entropy=entropy), parts, transform, entropy=entropy)


@pytest.mark.parametrize("error", [0.0, 0.01, 50.0])
@pytest.mark.parametrize("trained", ["hidden states second", "hidden weight bias states second"])
def test_precomputed_gradients(trained: str, error: float):
    """Precomputed log-probs that are exact, slightly off, and useless."""
    parts, transform = make_parts(trained), LogitTransform()
    with torch.no_grad():
        logprobs = whole(parts, transform).logprobs + error * OF_ENTROPY
    actual = tiled(parts, transform, PrecomputedGradient(logprobs, 2.5 * OF_LOGPROBS))
    assert_same(actual, parts, transform)


def test_half_weights_under_a_float32_adapter():
    """As peft keeps them: products in half precision, the adapter's gradient in its own."""
    parts = make_parts()
    parts["weight"] = parts["weight"].bfloat16()
    parts["hidden"] = parts["hidden"].detach().bfloat16().requires_grad_()
    actual = gradients(tiled(parts, LogitTransform()), parts, entropy=False)
    expected = gradients(whole({k: v.float() for k, v in parts.items()}, LogitTransform()), parts, entropy=False)
    for name, value in actual.items():
        assert value.dtype == parts[name].dtype
        torch.testing.assert_close(value.float(), expected[name].float(), rtol=0.1, atol=0.05)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, output.numel() if isinstance(output, torch.Tensor) else 0)
        return output


def test_neither_logits_nor_a_merged_weight_ever_exist():
    parts = make_parts()
    with Largest() as largest:
        gradients(tiled(parts, LogitTransform()), parts, entropy=False)
    assert largest.numel < VOCAB * WIDTH
    sizes = sorted([NUM_TOKENS * (WIDTH + RANK), VOCAB * WIDTH, NUM_TOKENS * VOCAB])
    assert all(a < b for a, b in pairwise(sizes))
