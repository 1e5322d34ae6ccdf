"""The terms of losses with numbers worked by hand, their gradients, and what they hold constant."""

from __future__ import annotations

import math

import pytest
import torch
from loss_batches import make_batch

from groupgrad.objectives import clipping
from groupgrad.objectives.methods import vespo
from groupgrad.objectives.ragged import PerRow, PerToken, broadcast_to_tokens, row_mean, row_sum
from groupgrad.objectives.terms import (
    at_level,
    kl_to_reference,
    policy_log_ratio,
    policy_ratio,
    reference_gap,
    unbiased_kl,
)


def tensor(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def gradient(loss, leaf):
    return torch.autograd.grad(loss.sum(), leaf)[0].tolist()


def test_clipped():
    ratio = tensor(0.5, 0.5, 1.0, 1.5, 1.5, grad=True)
    loss = clipping.clipped(ratio, tensor(1.0, -1.0, 1.0, 1.0, -1.0), 0.2, 0.3)
    assert loss.tolist() == pytest.approx([-0.5, 0.8, -1.0, -1.3, 1.5])
    assert gradient(loss, ratio) == pytest.approx([-1.0, 0.0, -1.0, 0.0, 1.0])


def test_two_sided_clipping_bounds_the_unclipped_side():
    ratio = tensor(3.0, 9.0, 9.0, grad=True)
    loss = clipping.clipped(ratio, tensor(-1.0, -1.0, 1.0), 0.2, 0.2, delta=4.0)
    assert loss.tolist() == pytest.approx([3.0, 4.0, -1.2])
    assert gradient(loss, ratio) == pytest.approx([1.0, 0.0, 0.0])


def test_vespo_weight():
    phi = vespo.gamma_weights(tensor(0.0, 0.2, 0.4), tensor(-1.0, 0.0, -0.5), 2.0, 3.0, 3.0, 2.0)
    assert phi.tolist() == pytest.approx([1.0, 0.767814, 1.241538], abs=1e-6)
    extreme = vespo.gamma_weights(tensor(20.0, math.log(1e-8), math.nan), tensor(1.0, 1.0, 1.0), 2.0, 3.0, 3.0, 2.0)
    assert extreme.tolist() == pytest.approx([0.0, math.exp(3 - 3e-8) * 1e-16, 0.0], abs=1e-25)
    # A decay of 0 counts as 1e-4.
    floor = vespo.gamma_weights(tensor(1.0), tensor(1.0), 0.0, 0.0, 1.0, 1.0)
    assert floor.item() == pytest.approx(math.exp(1e-4 * (1 - math.e)))


def test_sequence_weight_is_bounded():
    batch = make_batch([[True, True], [True, False], []], [0.0] * 3)
    log_ratio = tensor(-30.0, 1.0, 50.0, 0.0)
    assert vespo.sequence_log_weight(log_ratio, None, batch).tolist() == [math.log(1e-8), 20.0, 0.0]
    log_ratio = tensor(0.5, -1.0, 2.0, 0.0)
    token = PerToken(tensor(1.0, math.e, math.e, 5.0))
    assert vespo.sequence_log_weight(log_ratio, token, batch).tolist() == pytest.approx([0.5, 3.0, 0.0])
    row = PerRow(tensor(math.e, 0.0, 1.0))
    assert vespo.sequence_log_weight(log_ratio, row, batch).tolist() == pytest.approx([0.5, 2 + math.log(1e-8), 0])


def test_rows():
    batch = make_batch([[True, False, True], [], [False], [True]], [0.0] * 4)
    values = tensor(1.0, math.nan, 3.0, math.inf, 5.0)
    assert batch.loss_tokens.tolist() == [2, 0, 0, 1]
    assert row_sum(values, batch).tolist() == [4, 0, 0, 5]
    assert row_mean(values, batch).tolist() == [2, 0, 0, 5]
    assert broadcast_to_tokens(PerRow(tensor(1, 2, 3, 4)), batch).tolist() == [1, 1, 1, 3, 4]
    assert broadcast_to_tokens(PerToken(values), batch) is values


def test_ratios():
    batch = make_batch([[True, True], [False], []], [0.0] * 3)
    logprobs = tensor(-1.0, -2.0, -3.0, grad=True)
    log_ratio = policy_log_ratio(logprobs, tensor(-1.4, -1.8, -9.0), batch)
    assert log_ratio.tolist() == pytest.approx([0.4, -0.2, 0.0])
    token, sequence = (policy_ratio(at_level(log_ratio, batch, level)) for level in ("token", "sequence"))
    assert isinstance(token, PerToken) and isinstance(sequence, PerRow)
    assert token.values.tolist() == pytest.approx([math.exp(0.4), math.exp(-0.2), 1.0])
    assert sequence.values.tolist() == pytest.approx([math.exp(0.1), 1.0, 1.0])
    assert gradient(sequence.values, logprobs) == pytest.approx([math.exp(0.1) / 2] * 2 + [0.0])
    present = policy_log_ratio(logprobs, None, batch)
    assert present.tolist() == [0, 0, 0] and gradient(present, logprobs) == [1, 1, 0]


def test_kl():
    batch = make_batch([[True, True, False]], [0.0])
    logprobs = tensor(-1.0, -2.0, -3.0, grad=True)
    gap = reference_gap(logprobs, tensor(-1.5, -2.0, 900.0), batch)
    kl = kl_to_reference(gap)
    assert kl.tolist() == pytest.approx([math.exp(-0.5) - 0.5, 0.0, 0.0])
    assert gradient(kl, logprobs) == pytest.approx([1 - math.exp(-0.5), 0.0, 0.0])
    ratio = PerToken(tensor(2.0, 2.0, 2.0, grad=True))
    corrected = unbiased_kl(gap.detach(), ratio, PerToken(ratio.values.detach().log()), batch)
    assert corrected.tolist() == pytest.approx([2 * (math.exp(-0.5) - 0.5), 0.0, 0.0])
    assert gradient(corrected, ratio.values) == pytest.approx([math.exp(-0.5) - 0.5, 0.0, 0.0])


def test_kl_is_never_negative_in_float32():
    logprobs = torch.tensor([-1.0, -2.0, -0.3, -7.1])
    gaps = torch.tensor([1e-4, -1e-4, 3e-5, -2e-5])
    kl = kl_to_reference((logprobs + gaps) - logprobs)
    assert (kl >= 0).all()
