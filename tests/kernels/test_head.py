"""Tiles of logits: scores and gradients of float64, and the very bits that a choice of tokens gives."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from groupgrad.kernels.choose import Choice, bits_factor, choose, score
from groupgrad.kernels.head import BITS, SoftmaxSums, TileGradient, pass_tile
from groupgrad.scoring.head_tiles import slices

INF, NAN, NATS = math.inf, math.nan, math.log(2.0)


@dataclass
class TileScores:
    """Scores of some tokens from tiles."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    normaliser: torch.Tensor
    """Bits."""


def scored(
    kernels: ctypes.CDLL,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    tokens_at_once: int = 1000,
    bounds: Sequence[int] = (),
) -> TileScores:
    """Scores of `tokens` from tiles of `tokens_at_once` rows, with the vocabulary cut at the `bounds`."""
    sums, size = SoftmaxSums.empty(len(logits)), logits.shape[1]
    for first, last in zip([0, *bounds], [*bounds, size]):
        for start in range(0, len(logits), tokens_at_once):
            rows = slice(start, start + tokens_at_once)
            tile = logits[rows, first:last].clone(memory_format=torch.contiguous_format)
            pass_tile(kernels, tile, tokens[rows], first, bits_factor(temperature), sums=sums.at(rows))
            assert torch.equal(tile, logits[rows, first:last]) or tile.isnan().any(), "nothing is overwritten"
    return TileScores(*sums.finish(kernels))


def case(size: int, rows: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (rows, size) and a token of each row."""
    torch.manual_seed(size)
    return 4 * torch.randn(rows, size), torch.randint(size, (rows,))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit-exact, NaN where the other is NaN."""
    return torch.equal(a.nan_to_num(7e30), b.nan_to_num(7e30))


# ------------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 127, 128, 129, 300, 2048, 2049, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_float64(size: int, temperature: float, kernels: ctypes.CDLL):
    logits, tokens = case(size)
    found = scored(kernels, logits, tokens, temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    expected = exact.gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=3e-7, atol=2e-6)
    torch.testing.assert_close(found.entropies.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=2e-6)
    normaliser = (logits.double() / temperature).logsumexp(-1) * BITS
    torch.testing.assert_close(found.normaliser.double(), normaliser, rtol=3e-7, atol=2e-6)
    if size == 1:
        assert found.logprobs.abs().max() < 1e-7 and found.entropies.abs().max() < 1e-7


@pytest.mark.parametrize("size", [1, 127, 128, 129, 2049, 6000])
def test_bits_do_not_depend_on_tiles_and_are_those_of_a_choice(
    size: int, kernels: ctypes.CDLL, threads: Callable[[int], None]
):
    logits, _ = case(size, rows=70)
    draws = torch.rand(70, dtype=torch.float64)
    default = [part.start for part in slices(size, 2048, 128)][1:]
    uneven = [bound for bound in (128, 384, 512, 2176, 4480) if bound < size]
    for temperature in (1.0, 0.7):
        threads(1)
        chosen = choose(kernels, logits, temperature, draws)
        assert chosen is not None
        known = score(kernels, logits, temperature, chosen.tokens)
        assert known is not None
        assert torch.equal(known.logprobs, chosen.logprobs) and torch.equal(known.entropies, chosen.entropies)
        for tokens_at_once, bounds in ((1, default), (64, default), (7, uneven), (70, ()), (3, range(128, size, 128))):
            threads(1 + tokens_at_once % 3)
            found = scored(kernels, logits, chosen.tokens, temperature, tokens_at_once, list(bounds))
            assert torch.equal(found.logprobs, chosen.logprobs), (tokens_at_once, bounds)
            assert torch.equal(found.entropies, chosen.entropies), (tokens_at_once, bounds)


def test_a_large_vocabulary_is_summed_in_float64(kernels: ctypes.CDLL):
    # 1600 blocks of tokens: a float32 sum over them would be off by some 1e-6.
    torch.manual_seed(0)
    logits, size = torch.rand(3, 200_000), 2048
    sums = SoftmaxSums.empty(3)
    for first in range(0, 200_000, size):
        tile = logits[:, first : first + size].contiguous()
        pass_tile(kernels, tile, torch.zeros(3, dtype=torch.int64), first, bits_factor(1.0), sums=sums)
    expected = logits.double().logsumexp(-1) * BITS
    # In a block, 16 weights a lane are added, each addition off by half a unit (6e-8) at most: 1.5e-7 in all by chance,
    # in the mean of 1600 blocks 4e-9. The exponential is off by 3e-8, on average by 1e-9. Four times that: 3e-8 bits.
    torch.testing.assert_close(sums.normaliser(), expected, rtol=0, atol=6e-8)
    # Both are about 12 nats and are rounded to float32, by 4.8e-7 at most; the token's own bits round by 6e-8 before.
    found, exact = sums.finish(kernels), logits.double().log_softmax(-1)
    torch.testing.assert_close(found[0].double(), exact[:, 0], rtol=1e-7, atol=0)
    torch.testing.assert_close(found[1].double(), -(exact.exp() * exact).sum(-1), rtol=1e-7, atol=0)


def test_a_token_outside_of_the_vocabulary_has_no_score(kernels: ctypes.CDLL):
    logits, _ = case(130, rows=3)
    found = scored(kernels, logits, torch.tensor([-1, 130, 129]), bounds=[128])
    assert found.logprobs.isnan().tolist() == [True, True, False]
    assert found.entropies.isfinite().all()


# ------------------------------------------------------------------------------------------------ extreme logits


def extreme(size: int) -> dict[str, torch.Tensor]:
    """Extreme logits (1, size); the last token is scored."""
    plain = torch.linspace(-3, 3, size)[None]
    made = {name: plain.clone() for name in ("low others", "minus infinity", "minus infinity itself", "not a number")}
    made["low others"][0, :-1] = -1e4
    made["minus infinity"][0, : size // 2] = -INF
    made["minus infinity itself"][0, -1] = -INF
    made["not a number"][0, 0] = NAN
    made["low"] = torch.full((1, size), -1e4)
    made["very low"] = plain - 1e30
    made["lowest"] = torch.full((1, size), -3e38)
    made["all minus infinity"] = torch.full((1, size), -INF)
    made["infinity"] = plain.clone()
    made["infinity"][0, size // 3] = INF
    made["large"] = plain + 1e4
    made["one far above"] = plain.clone()
    made["one far above"][0, -1] = 1e38
    return made


@pytest.mark.parametrize("size", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("name", sorted(extreme(2)))
def test_extreme_logits_get_what_a_choice_gives_and_crash_nothing(name: str, size: int, kernels: ctypes.CDLL):
    logits, last = extreme(size)[name], torch.tensor([size - 1])
    known = score(kernels, logits, 1.0, last)
    assert known is not None
    for bounds in ([], [b for b in (128, 256) if b < size]):
        found = scored(kernels, logits, last, bounds=bounds)
        assert same(found.logprobs, known.logprobs) and same(found.entropies, known.entropies)
    for draw in (0.0, 0.5, 1.0 - 2**-53):
        chosen = choose(kernels, logits, 1.0, torch.tensor([draw], dtype=torch.float64))
        assert chosen is not None and 0 <= int(chosen.tokens) < size
        again = score(kernels, logits, 1.0, chosen.tokens)
        assert again is not None
        assert same(again.logprobs, chosen.logprobs) and same(again.entropies, chosen.entropies)
        check_choice(logits, chosen)


def check_choice(logits: torch.Tensor, chosen: Choice) -> None:
    """Log-prob and entropy are those of float64, or none where these are none."""
    exact = logits.double().log_softmax(-1)
    expected, found = float(exact[0, chosen.tokens]), float(chosen.logprobs)
    is_absurd = bool((logits.abs() >= 1e30).all())  # all share in one peak there
    if math.isfinite(expected) and not is_absurd:
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6 * max(1.0, float(logits.abs()[0, -1]) / 10))
        entropy = -torch.where(exact.isinf(), 0.0, exact.exp() * exact).sum().item()
        assert float(chosen.entropies) == pytest.approx(entropy, abs=1e-2 if float(logits.abs().max()) > 1e3 else 2e-6)
    elif not math.isfinite(expected):
        assert not math.isfinite(found)


def test_impossible_tokens_have_no_part(kernels: ctypes.CDLL):
    logits, _ = case(300, rows=2)
    cut = logits.clone()
    cut[:, ::3] = -INF
    low = logits.clone()
    low[:, ::3] = -1e4
    tokens = torch.tensor([1, 299])
    expected = scored(kernels, cut, tokens)
    found = scored(kernels, low, tokens)
    assert torch.equal(found.logprobs, expected.logprobs) and torch.equal(found.entropies, expected.entropies)
    exact = cut.double().log_softmax(-1)
    torch.testing.assert_close(found.logprobs.double(), exact[[0, 1], tokens], rtol=1e-6, atol=1e-6)
    cannot = scored(kernels, cut, torch.tensor([0, 297]))
    assert (cannot.logprobs == -INF).all()


# ------------------------------------------------------------------------------------------------ gradients


def logit_gradients(
    kernels: ctypes.CDLL, logits: torch.Tensor, tokens: torch.Tensor, gradient: TileGradient, bounds: Sequence[int] = ()
) -> torch.Tensor:
    """(rows, vocabulary) gradients that overwrite the tiles."""
    parts = []
    for first, last in zip([0, *bounds], [*bounds, logits.shape[1]]):
        tile = logits[:, first:last].clone(memory_format=torch.contiguous_format)
        pass_tile(kernels, tile, tokens, first, bits_factor(1.0), gradient=gradient)
        parts.append(tile)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("size", [1, 16, 127, 129, 2048, 3000])
@pytest.mark.parametrize("of_entropy", [False, True])
def test_gradients_are_those_of_float64(size: int, of_entropy: bool, kernels: ctypes.CDLL):
    logits, tokens = case(size)
    to_logprob, to_entropy = torch.randn(2, 9)
    to_entropy = to_entropy if of_entropy else torch.zeros(9)
    leaf = logits.double().requires_grad_()
    exact = leaf.log_softmax(-1)
    entropy = -(exact.exp() * exact).sum(-1)
    total = (to_logprob * exact.gather(-1, tokens[:, None]).squeeze(-1) + to_entropy * entropy).sum()
    (expected,) = torch.autograd.grad(total, leaf)
    normaliser = (leaf.logsumexp(-1) * BITS).detach().float()
    of_chances = -to_logprob - to_entropy * entropy.detach().float()
    own = torch.randn(9)
    gradient = TileGradient(normaliser, of_chances, own, -NATS * to_entropy if of_entropy else None)
    bounds = [bound for bound in (128, 1024, 2176) if bound < size]
    found = logit_gradients(kernels, logits, tokens, gradient, bounds)
    assert torch.equal(found[torch.arange(9), tokens], own)
    expected[torch.arange(9), tokens] = own.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)
    assert torch.equal(logit_gradients(kernels, logits, tokens, gradient), found)


def test_one_pass_may_give_sums_and_gradients(kernels: ctypes.CDLL, threads: Callable[[int], None]):
    logits, tokens = case(5000)
    expected = scored(kernels, logits, tokens)
    gradient = TileGradient(expected.normaliser, torch.randn(9), torch.randn(9), torch.randn(9))
    threads(3)
    sums, tile = SoftmaxSums.empty(9), logits.clone()
    pass_tile(kernels, tile, tokens, 0, bits_factor(1.0), sums=sums, gradient=gradient)
    logprobs, entropies, normaliser = sums.finish(kernels)
    assert torch.equal(logprobs, expected.logprobs) and torch.equal(entropies, expected.entropies)
    assert torch.equal(normaliser, expected.normaliser)
    torch.testing.assert_close(sums.normaliser().float(), normaliser, rtol=0, atol=0)
    threads(1)
    assert torch.equal(tile, logit_gradients(kernels, logits, tokens, gradient))


def test_the_own_token_can_be_left_out(kernels: ctypes.CDLL):
    logits, tokens = case(300)
    normaliser = (logits.logsumexp(-1) * BITS).float()
    found = logit_gradients(kernels, logits, tokens, TileGradient(normaliser, torch.full((9,), 2.0)), [128])
    expected = 2 * logits.double().softmax(-1)
    expected[torch.arange(9), tokens] = 0.0
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-9)
    assert not found[torch.arange(9), tokens].any()


def test_impossible_tokens_have_no_gradient(kernels: ctypes.CDLL):
    logits, tokens = case(300)
    logits[:, ::3], tokens[:] = -INF, 1
    logits[:, 3:6] = -1e4
    normaliser = (logits.logsumexp(-1) * BITS).float()
    found = logit_gradients(kernels, logits, tokens, TileGradient(normaliser, *torch.randn(3, 9)))
    assert found.isfinite().all() and not found[:, ::3].any() and not found[:, 3:6].any()
    # Nothing but such tokens in a whole block, and none that can come beside it.
    logits[:, :256] = -INF
    found = logit_gradients(kernels, logits, tokens, TileGradient(normaliser, *torch.randn(3, 9)), [128])
    assert found[:, 256:].isfinite().all() and found[:, 2:256].eq(0).all()


def test_a_normaliser_that_is_far_off_gives_the_same_up_to_a_factor(kernels: ctypes.CDLL):
    # Computed beforehand, from weights that have changed since.
    logits, tokens = case(300)
    ones = torch.ones(9)
    right = (logits.logsumexp(-1) * BITS).float()
    found = logit_gradients(kernels, logits, tokens, TileGradient(right + 20, ones))
    expected = logit_gradients(kernels, logits, tokens, TileGradient(right, ones))
    torch.testing.assert_close(found * 2**20, expected, rtol=3e-5, atol=0)


def test_another_default_dtype_changes_nothing(kernels):
    logits, tokens = torch.randn(5, 300), torch.randint(300, (5,))
    expected, draws = score(kernels, logits, 1.0, tokens), torch.rand(5, dtype=torch.float64)
    chosen = choose(kernels, logits, 1.0, draws)
    assert expected is not None and chosen is not None
    torch.set_default_dtype(torch.bfloat16)
    try:
        found, again, sums = (
            score(kernels, logits, 1.0, tokens),
            choose(kernels, logits, 1.0, draws),
            SoftmaxSums.empty(5),
        )
        pass_tile(kernels, logits.clone(), tokens.int(), 0, BITS, sums=sums)
        logprobs, entropy, _ = sums.finish(kernels)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found is not None and again is not None
    assert torch.equal(found.logprobs, expected.logprobs) and torch.equal(again.logprobs, chosen.logprobs)
    assert torch.equal(logprobs, expected.logprobs) and torch.equal(entropy, expected.entropies)
