"""The compiled sampling of tokens: probabilities, log-probs and entropies as in float64, and NaN logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from groupgrad.kernels import library, status
from groupgrad.kernels.choose import Choice, choose

pytestmark = pytest.mark.skipif(library() is None, reason=status())

INF, LAST = float("inf"), 1.0 - 2**-53


def sampled(logits: torch.Tensor, draws: list[float], temperature: float = 1.0) -> Choice:
    kernels = library()
    assert kernels is not None
    choice = choose(kernels, logits, temperature, torch.tensor(draws, dtype=torch.float64))
    assert choice is not None
    return choice


@pytest.mark.parametrize("size", [1, 7, 127, 128, 129, 40_003])
@pytest.mark.parametrize(("temperature", "num_threads"), [(1.0, 1), (0.3, 3)])
def test_numbers_are_those_of_float64(size: int, temperature: float, num_threads: int, threads):
    threads(num_threads)
    torch.manual_seed(size)
    logits, draws = 4 * torch.randn(9, size), [*torch.rand(7).tolist(), 0.0, LAST]
    choice = sampled(logits, draws, temperature)
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    for row, token in enumerate(choice.tokens.tolist()):
        before, after = shares[row, :token].sum(), shares[row, : token + 1].sum()
        assert before - 1e-6 <= draws[row] <= after + 1e-6
        assert choice.logprobs[row].item() == pytest.approx(math.log(shares[row, token]), rel=2e-7, abs=2e-6)
        entropy = -(shares[row] * np.log(shares[row])).sum()
        assert choice.entropies[row].item() == pytest.approx(entropy, abs=2e-6)


def test_shares_decide_to_the_last_digit():
    # Four tokens of probability 1/4 each: a draw at a border takes the next token.
    draws = [0.0, 0.25 - 2**-40, 0.25, 0.5, 0.75 - 2**-40, 0.75, LAST]
    choice = sampled(torch.zeros(7, 4), draws)
    assert choice.tokens.tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert choice.logprobs.tolist() == pytest.approx([-math.log(4)] * 7)


def test_tokens_that_cannot_come_do_not():
    logits = torch.full((3, 300), -INF)
    logits[:, 130], logits[:, 299] = 1.0, 1.0
    choice = sampled(logits, [0.0, 0.5, LAST])
    assert choice.tokens.tolist() == [130, 299, 299]
    assert choice.logprobs.tolist() == pytest.approx([-math.log(2)] * 3)
    assert choice.entropies.tolist() == pytest.approx([math.log(2)] * 3)


@pytest.mark.parametrize("wrong", [math.nan, INF])
@pytest.mark.parametrize("place", [0, 5, 140])
def test_logits_that_are_no_numbers_give_no_log_prob(wrong: float, place: int):
    logits = torch.zeros(2, 141)
    logits[1, place] = wrong
    choice = sampled(logits, [0.5, 0.5])
    assert choice.logprobs[0].item() == pytest.approx(-math.log(141))
    assert not math.isfinite(choice.logprobs[1].item())
    assert 0 <= choice.tokens[1] < 141


def test_other_logits_are_left_to_others():
    kernels, draws = library(), torch.zeros(4, dtype=torch.float64)
    assert kernels is not None
    for logits in (torch.zeros(4, 8).bfloat16(), torch.zeros(8, 4).T, torch.zeros(4, 0)):
        assert choose(kernels, logits, 1.0, draws) is None
