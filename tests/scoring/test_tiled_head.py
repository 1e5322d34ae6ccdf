"""Tiled log-probs, entropies and gradients equal those of whole logits in float64, and no logits are ever kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from groupgrad.batch import TokenScores
from groupgrad.kernels.compile import SWITCH
from groupgrad.scoring.head_tiles import slices
from groupgrad.scoring.tiled_head import (
    LogitTransform,
    OutputHead,
    PrecomputedGradient,
    Tiles,
    tiled_scores,
)


@dataclass
class Case:
    """Arguments of one call, and the weights of its results in the loss."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    tokens: torch.Tensor
    of_logprobs: torch.Tensor
    of_entropy: torch.Tensor | None
    transform: LogitTransform = field(default_factory=LogitTransform)
    temperature: float = 1.0
    tiles: Tiles | None = None
    precomputed: PrecomputedGradient | None = None
    adapter: torch.Tensor | None = None
    states: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor | None]:
        """Hidden states, the head's weight and bias, an adapter's states and second weight."""
        return [self.hidden, self.weight, self.bias, self.states, self.adapter]

    def inputs(self) -> list[torch.Tensor]:
        """The arguments that need a gradient."""
        return [x for x in self.tensors() if x is not None and x.requires_grad]

    def scores(self) -> TokenScores:
        return tiled_scores(
            self.hidden,
            OutputHead(self.weight, self.bias, self.adapter, self.states),
            self.tokens,
            transform=self.transform,
            temperature=self.temperature,
            entropy_gradient=self.of_entropy is not None,
            precomputed=self.precomputed,
            tiles=self.tiles,
        )

    def loss(self, scores: TokenScores) -> torch.Tensor:
        loss = (scores.logprobs * self.of_logprobs).sum()
        return loss if self.of_entropy is None else loss + (scores.entropy * self.of_entropy).sum()

    def size_of_terms(self) -> float:
        """Bound of the terms whose sum is an entry of a gradient, for p near 1."""
        incoming = self.of_logprobs.abs() + (0.0 if self.of_entropy is None else self.of_entropy.abs())
        factors = max(1.0, *(float(x.detach().abs().max()) for x in self.tensors() if x is not None and x.numel()))
        return float(incoming.sum()) * self.transform.scale / self.temperature * factors

    def gradients(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.loss(self.scores()), self.inputs())


def make_case(
    num_tokens: int = 13,
    vocab: int = 37,
    width: int = 8,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    entropy: bool = False,
    frozen_head: bool = False,
    rank: int = 0,
    **options: Any,
) -> Case:
    """Random numbers; with a `rank` the head has an adapter, which trains."""
    torch.manual_seed(seed)
    parts = [torch.randn(num_tokens, width), torch.randn(vocab, width), torch.randn(vocab) if bias else None]
    hidden, weight, offset = (None if x is None else x.to(dtype) for x in parts)
    assert hidden is not None and weight is not None
    hidden.requires_grad_()
    for x in (weight, offset):
        if x is not None:
            x.requires_grad_(not frozen_head)
    tokens = torch.randint(0, vocab, (num_tokens,))
    of_entropy = torch.randn(num_tokens) if entropy else None
    of_logprobs = torch.randn(num_tokens)
    if rank:
        for name, size in (("states", num_tokens), ("adapter", vocab)):
            options[name] = torch.randn(size, rank).to(dtype).requires_grad_()
    return Case(hidden, weight, offset, tokens, of_logprobs, of_entropy, **options)


def reference(case: Case) -> tuple[TokenScores, tuple[torch.Tensor, ...]]:
    """Scores and gradients from whole logits in float64."""
    doubles = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in case.tensors()]
    hidden, weight, bias, states, second = doubles
    assert hidden is not None and weight is not None
    logits = nn.functional.linear(hidden, weight, bias)
    if states is not None and second is not None:
        logits = logits + states @ second.T
    logits = case.transform.scale * logits
    if case.transform.softcap is not None:
        logits = case.transform.softcap * torch.tanh(logits / case.transform.softcap)
    distribution = torch.log_softmax(logits / case.temperature, -1)
    scores = TokenScores(
        logprobs=distribution.gather(1, case.tokens[:, None]).squeeze(1),
        entropy=-(distribution.exp() * distribution).sum(-1),
    )
    gradients = torch.autograd.grad(case.loss(scores), [x for x in doubles if x is not None and x.requires_grad])
    return scores, gradients


def assert_as_reference(case: Case, *, scores: float = 2e-6, gradients: float = 1e-5) -> None:
    """`scores` is relative to the log-probs' size (at least 1), `gradients` to each one's largest entry.

    Gradients may differ by the rounding of their terms too, of which they are a small difference for certain tokens.
    """
    expected, expected_gradients = reference(case)
    actual = case.scores()
    for name in ("logprobs", "entropy"):
        wanted = getattr(expected, name).detach()
        size = max(1.0, float(wanted.abs().max())) if len(wanted) else 1.0
        torch.testing.assert_close(getattr(actual, name).double(), wanted, rtol=0, atol=scores * size, msg=name)
    rounding = torch.finfo(case.hidden.dtype).eps * case.size_of_terms()
    for ours, wanted, x in zip(case.gradients(), expected_gradients, case.inputs(), strict=True):
        assert ours.dtype == x.dtype and ours.shape == x.shape
        size = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=gradients * max(size, 1e-6) + rounding)


@settings(max_examples=50, deadline=None)
@given(
    num_tokens=st.integers(1, 12),
    vocab=st.integers(1, 30),
    width=st.integers(1, 9),
    tiles=st.builds(Tiles, st.integers(1, 15), st.integers(1, 36)),
    transform=st.builds(LogitTransform, st.sampled_from([1.0, 0.25, 1.7]), st.sampled_from([None, 0.5, 3.0])),
    temperature=st.sampled_from([1.0, 0.6, 1.9]),
    switches=st.fixed_dictionaries({name: st.booleans() for name in ("bias", "entropy", "frozen_head")}),
    rank=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)
def test_equals_whole_logits(num_tokens, vocab, width, tiles, transform, temperature, switches, rank, seed):
    options = {"transform": transform, "temperature": temperature, "tiles": tiles, "rank": rank, **switches}
    case = make_case(num_tokens, vocab, width, seed=seed, **options)
    # Coinciding logits (V = 1, or tiny heads) have gradients of nearly zero, where no relative measure holds.
    _, wanted = reference(case)
    if min(float(g.abs().max()) for g in wanted) > 1e-2:
        assert_as_reference(case)
    doubled = make_case(num_tokens, vocab, width, seed=seed, dtype=torch.float64, **options)
    assert_as_reference(doubled, scores=1e-12, gradients=1e-8)


@pytest.mark.parametrize(
    ("seed", "cap", "temperature", "frozen_head"),
    [(49, None, 1.0, False), (49, None, 0.6, False), (78, 0.5, 0.6, True)],
)
def test_nearly_certain_tokens_and_logits_near_the_cap(seed, cap, temperature, frozen_head):
    """There 1 - p and 1 - tanh^2 from rounded p and tanh had errors of up to 3e-4 of the largest gradient."""
    options: dict[str, Any] = {"transform": LogitTransform(1.7, cap), "temperature": temperature, "tiles": Tiles(1, 1)}
    case = make_case(2, 2, 2, seed=seed, bias=cap is not None, frozen_head=frozen_head, **options)
    for ours, wanted in zip(case.gradients(), reference(case)[1], strict=True):
        assert float((ours - wanted).abs().max() / wanted.abs().max()) < 3e-5


@pytest.mark.parametrize("frozen_head", [False, True])
def test_extreme_logits_stay_finite(frozen_head):
    case = make_case(frozen_head=frozen_head, tiles=Tiles(4, 8))
    with torch.no_grad():
        case.hidden *= 300
    assert float(reference(case)[0].logprobs.detach().min()) < -1000
    assert_as_reference(case)


def test_a_confident_token_keeps_its_gradient_in_half_precision():
    """1 - p is far below bfloat16's spacing around p."""
    torch.manual_seed(0)
    hidden = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.stack([torch.full((4,), 2.5), *torch.zeros(3, 4)]).to(torch.bfloat16)
    for trains in (True, False):
        weight = rows.clone().requires_grad_(trains)
        scores = tiled_scores(hidden, OutputHead(weight), torch.tensor([0]), transform=LogitTransform())
        (gradient,) = torch.autograd.grad(scores.logprobs.sum(), hidden)
        outside = 3 / (3 + math.exp(10))
        torch.testing.assert_close(gradient.float(), torch.full((1, 4), 2.5 * outside), rtol=1e-2, atol=0)


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_half_precision_is_as_close_as_its_products(entropy, frozen_head):
    case = make_case(
        40, 300, 32, dtype=torch.bfloat16, bias=True, entropy=entropy, frozen_head=frozen_head, tiles=Tiles(16, 64)
    )
    with torch.no_grad():
        case.weight *= 0.2
    assert_as_reference(case, scores=2e-2, gradients=2e-2)


def test_a_float32_head_takes_half_precision_states():
    case = make_case(tiles=Tiles(5, 16))
    with torch.no_grad():
        case.hidden.copy_(case.hidden.to(torch.bfloat16))
    half = case.hidden.detach().to(torch.bfloat16).requires_grad_()
    expected, wanted = case.scores(), case.gradients()
    case.hidden = half
    assert torch.equal(case.scores().logprobs, expected.logprobs)
    to_hidden, to_weight = case.gradients()
    assert torch.equal(to_weight, wanted[1])
    assert torch.equal(to_hidden, wanted[0].to(torch.bfloat16))


@pytest.mark.parametrize(("early", "frozen"), [(False, False), (True, False), (False, True)])
def test_a_half_precision_weight_is_read_as_float32(early, frozen):
    """Scores and gradients are those of the same weight in float32, the weight's rounded to its own type."""
    case = make_case(tiles=Tiles(5, 16), bias=True, frozen_head=frozen)
    with torch.no_grad():
        case.weight.copy_(case.weight.to(torch.bfloat16))
    expected, wanted = case.scores(), case.gradients()
    case.weight = case.weight.detach().to(torch.bfloat16).requires_grad_(not frozen)
    case.transform = LogitTransform(in_float32=True)
    if early:
        case.precomputed = PrecomputedGradient(expected.logprobs.detach(), case.of_logprobs)
    assert torch.equal(case.scores().logprobs, expected.logprobs)
    actual = case.gradients()
    assert len(actual) == (1 if frozen else 3)
    for one, other, tensor in zip(actual, wanted, case.inputs()):
        assert one.dtype == tensor.dtype
        assert torch.equal(one, other.to(one.dtype))


def test_half_weights_under_a_float32_adapter():
    """As peft keeps them: products in half precision, the adapter's gradient in its own."""
    case = make_case(frozen_head=True, bias=True, rank=3, tiles=Tiles(4, 10))
    case.weight = case.weight.bfloat16()
    case.hidden = case.hidden.detach().bfloat16().requires_grad_()
    for actual, expected, tensor in zip(case.gradients(), reference(case)[1], case.inputs(), strict=True):
        assert actual.dtype == tensor.dtype
        torch.testing.assert_close(actual.double(), expected, rtol=0.1, atol=0.05)


def test_under_autocast_it_multiplies_as_a_linear_layer_does():
    case = make_case(30, 80, 16, bias=True, tiles=Tiles(16, 32))
    assert case.bias is not None
    with torch.autocast("cpu", torch.bfloat16):
        logits = nn.functional.linear(case.hidden, case.weight, case.bias).double()
        actual, gradients = case.scores(), case.gradients()
        case.transform = LogitTransform(in_float32=True)
        exact = case.scores()
    expected = torch.log_softmax(logits, -1).gather(1, case.tokens[:, None]).squeeze(1)
    torch.testing.assert_close(actual.logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    assert [g.dtype for g in gradients] == [torch.float32] * 3
    size = float(reference(case)[1][1].abs().max())
    torch.testing.assert_close(gradients[1].double(), reference(case)[1][1], rtol=0, atol=2e-2 * size)
    torch.testing.assert_close(exact.logprobs.double(), reference(case)[0].logprobs.detach(), rtol=0, atol=1e-5)


def test_tokens_without_gradient_change_nothing():
    case = make_case(entropy=True, bias=True, tiles=Tiles(5, 16))
    assert case.of_entropy is not None
    case.of_logprobs[[0, 4, 5, 12]] = 0.0
    case.of_entropy[[0, 5, 7]] = 0.0
    assert_as_reference(case)
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(entropy=True, bias=True, dtype=dtype)
        case.of_logprobs.zero_()
        case.of_entropy = torch.zeros(13)
        assert all(torch.equal(g, torch.zeros_like(g)) for g in case.gradients())


def test_without_gradients_it_is_the_same(build):
    case = make_case(entropy=True)
    with torch.no_grad():
        plain = case.scores()
    assert torch.equal(plain.logprobs, case.scores().logprobs)
    assert not plain.logprobs.requires_grad
    without = make_case()
    assert without.scores().logprobs.requires_grad
    assert not without.scores().entropy.requires_grad


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens(dtype, frozen_head):
    case = make_case(0, dtype=dtype, frozen_head=frozen_head, bias=True)
    scores = case.scores()
    assert scores.logprobs.shape == scores.entropy.shape == (0,)
    gradients = case.gradients()
    assert [g.shape for g in gradients] == [x.shape for x in case.inputs()]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_layouts_of_memory_do_not_matter():
    case = make_case(12, 36, 8, tiles=Tiles(5, 16))
    expected = case.gradients()
    strided = case.hidden.detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()
    transposed = case.weight.detach().t().contiguous().t().requires_grad_()
    assert not strided.is_contiguous() and not transposed.is_contiguous()
    case.hidden, case.weight = strided, transposed
    for ours, wanted in zip(case.gradients(), expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_only_what_trains_gets_a_gradient():
    case = make_case(bias=True)
    assert case.bias is not None
    case.bias.requires_grad_(False)
    case.hidden.requires_grad_(False)
    assert_as_reference(case)
    assert len(case.gradients()) == 1


def with_precomputed(case: Case, *, seed: int = 0, noise: float = 1e-6) -> Case:
    """The case with approximate log-probs and a scaled gradient precomputed."""
    torch.manual_seed(seed)
    logprobs = reference(case)[0].logprobs.detach().float()
    case.precomputed = PrecomputedGradient(logprobs + noise * torch.randn_like(logprobs), case.of_logprobs * 2.5)
    return case


@settings(max_examples=30, deadline=None)
@example(1, 41, Tiles(1, 1), LogitTransform(1.0, 3.0), 1.0, True, 0, set(), 20)
@given(
    num_tokens=st.integers(1, 20),
    vocab=st.integers(2, 50),
    tiles=st.builds(Tiles, st.integers(1, 25), st.integers(1, 60)),
    transform=st.builds(LogitTransform, st.sampled_from([1.0, 0.25]), st.sampled_from([None, 3.0])),
    temperature=st.sampled_from([1.0, 0.6]),
    bias=st.booleans(),
    rank=st.sampled_from([0, 3]),
    spoiled=st.sets(st.tuples(st.integers(0, 19), st.sampled_from(["nan", "logprob", "gradient", "zero"]))),
    seed=st.integers(0, 99),
)
def test_a_precomputed_gradient_changes_no_number(
    num_tokens, vocab, tiles, transform, temperature, bias, rank, spoiled, seed
):
    options = {"bias": bias, "rank": rank, "transform": transform, "temperature": temperature, "tiles": tiles}
    case = make_case(num_tokens, vocab, seed=seed, **options)
    # The errors of all tokens add up where gradients nearly cancel.
    with_precomputed(case, seed=seed, noise=3e-7)
    assert case.precomputed is not None
    for token, how in spoiled:
        if token >= num_tokens:
            continue
        if how == "nan":
            case.precomputed.logprobs[token] = math.nan
        elif how == "logprob":
            case.precomputed.logprobs[token] += 0.1
        elif how == "gradient":
            case.precomputed.gradient[token] += 1.0
        else:
            case.precomputed.gradient[token] = 0.0
    if min(float(g.abs().max()) for g in reference(case)[1]) > 1e-2:
        assert_as_reference(case)


def test_a_precomputed_gradient_is_exact_where_all_tokens_are_nearly_certain():
    case = make_case(40, 16, 16, tiles=Tiles(16, 16))
    with torch.no_grad():
        case.weight.copy_(9 * torch.eye(16))
        case.hidden.copy_(0.05 * case.hidden + torch.eye(16)[case.tokens])
    logprobs = reference(case)[0].logprobs.detach()
    assert float(logprobs.min()) > -0.02 and float(logprobs.max()) < -1e-4
    plain = [float((a - b).abs().max()) for a, b in zip(case.gradients(), reference(case)[1], strict=True)]
    with_precomputed(case, noise=1e-6)
    actual = [float((a - b).abs().max()) for a, b in zip(case.gradients(), reference(case)[1], strict=True)]
    assert all(ours <= 3 * theirs for ours, theirs in zip(actual, plain, strict=True)), (actual, plain)


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("error", [-200.0, 200.0])
def test_a_precomputed_log_prob_far_off_changes_no_number(error, frozen_head):
    """Under a frozen head an adapter trains."""
    case = make_case(bias=True, frozen_head=frozen_head, rank=3 if frozen_head else 0, tiles=Tiles(5, 16))
    with_precomputed(case)
    assert case.precomputed is not None
    case.precomputed.logprobs[4] += error
    assert_as_reference(case)


def test_with_a_precomputed_gradient_tiles_are_computed_once(monkeypatch):
    from groupgrad.scoring import head_tiles as tiles

    passes: list[int] = []

    def counted(compute):
        return lambda self, h, w, b: (passes.append(len(h) * len(w)), compute(self, h, w, b))[1]

    for way in ("logits", "raw_logits"):
        monkeypatch.setattr(tiles._Grid, way, counted(getattr(tiles._Grid, way)))
    case = make_case(12, 36, tiles=Tiles(5, 16))
    case.gradients()
    assert sum(passes) == 2 * 12 * 36
    for spoiled, extra in ((0, 0), (3, 3 * 36)):
        with_precomputed(case)
        assert case.precomputed is not None
        case.precomputed.logprobs[:spoiled] += 0.01
        passes.clear()
        case.gradients()
        assert sum(passes) == 12 * 36 + extra
    passes.clear()
    frozen = make_case(12, 36, frozen_head=True)
    frozen.gradients()
    assert sum(passes) == 12 * 36


@pytest.mark.parametrize("precomputed", [False, True])
def test_a_graph_that_is_kept_gives_its_gradient_twice(precomputed):
    case = with_precomputed(make_case(bias=True)) if precomputed else make_case(entropy=True)
    loss = case.loss(case.scores())
    first = torch.autograd.grad(loss, case.inputs(), retain_graph=True)
    second = torch.autograd.grad(loss, case.inputs())
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()) if precomputed else 0.0)


def test_precomputed_gradients_are_not_for_half_precision_or_frozen_heads():
    for options in ({"dtype": torch.bfloat16}, {"frozen_head": True}):
        case = make_case(**options)
        expected = case.gradients()
        with_precomputed(case)
        assert all(torch.equal(a, b) for a, b in zip(case.gradients(), expected, strict=True))


def test_ids_outside_the_vocabulary_are_seen():
    case = make_case()
    case.tokens[3] = 37
    logprobs = case.scores().logprobs
    assert logprobs.isnan().nonzero().flatten().tolist() == [3]


class _Sizes(TorchDispatchMode):
    """Records the size of the largest tensor or storage that any operation returns, but for what was given."""

    def __init__(self, given: list[torch.Tensor | None]) -> None:
        super().__init__()
        self.largest = 0
        self._given = {x.untyped_storage().data_ptr() for x in given if x is not None}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        actual = func(*args, **(kwargs or {}))
        for x in actual if isinstance(actual, (tuple, list)) else (actual,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._given:
                self.largest = max(self.largest, x.numel(), x.untyped_storage().nbytes() // x.element_size())
        return actual


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"entropy": True}),
        (torch.float32, {"frozen_head": True, "rank": 3}),
        (torch.bfloat16, {"entropy": True}),
        (torch.bfloat16, {"frozen_head": True}),
    ],
)
def test_nothing_of_the_size_of_the_logits_is_ever_made(dtype, options):
    """Nor, with an adapter, a merged weight of 500 times 8."""
    case = make_case(300, 500, 8, dtype=dtype, bias=True, tiles=Tiles(36, 64), **options)
    case.transform = LogitTransform(softcap=4.0)
    with _Sizes(case.tensors()) as sizes:
        case.gradients()
    assert 0 < sizes.largest <= (300 * 11 if "rank" in options else 500 * 8)
    with _Sizes(case.tensors()) as sizes:
        nn.functional.linear(case.hidden, case.weight)
    assert sizes.largest == 300 * 500


def test_tiles_are_of_about_equal_size():
    assert [(s.start, s.stop) for s in slices(1100, 1024)] == [(0, 576), (576, 1100)]
    assert [(s.start, s.stop) for s in slices(10, 4)] == [(0, 4), (4, 8), (8, 10)]
    assert list(slices(0, 4)) == []
    for size in (1, 127, 2048, 2049, 5000, 32_000, 50_257, 151_936):
        parts = list(slices(size, 2048, 128))
        assert all(part.start % 128 == 0 and part.stop - part.start <= 2048 for part in parts)
        assert parts[-1].stop == size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_it_is_as_on_the_processor(dtype):
    case = make_case(100, 3000, 64, dtype=dtype, bias=True, entropy=True, tiles=Tiles(64, 1024))
    with torch.no_grad():
        case.weight *= 0.1
    wanted = case.gradients()
    for name in ("hidden", "weight", "bias", "tokens", "of_logprobs", "of_entropy"):
        value = getattr(case, name).detach().cuda()
        setattr(case, name, value.requires_grad_(value.is_floating_point() and not name.startswith("of_")))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, expected in zip(case.gradients(), wanted, strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_without_kernels_the_logits_of_a_small_vocabulary_are_rounded_once(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    torch.manual_seed(0)
    hidden, weight, tokens = torch.randn(4000, 64), 0.6 * torch.randn(19, 64), torch.randint(19, (4000,))
    expected = (hidden.double() @ weight.double().T).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    known = PrecomputedGradient(expected.float(), torch.ones(4000))
    weight.requires_grad_()
    for actual in (
        tiled_scores(hidden, OutputHead(weight), tokens, transform=LogitTransform()),
        tiled_scores(hidden, OutputHead(weight, torch.zeros(19)), tokens, transform=LogitTransform()),
        tiled_scores(hidden, OutputHead(weight), tokens, precomputed=known, transform=LogitTransform()),
    ):
        off = actual.logprobs.detach().double() - expected
        assert off.square().mean().sqrt() < 8e-7 and off.abs().max() < 4.5e-6
