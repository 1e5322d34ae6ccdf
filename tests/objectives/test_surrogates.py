"""The terms of losses with numbers worked by hand, their gradients, and what they hold constant."""

from __future__ import annotations

import math

import pytest
import torch
from loss_batches import make_batch

from groupgrad.objectives.methods import vespo
from groupgrad.objectives.terms import kl_to_reference


def tensor(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_vespo_weight():
    phi = vespo.gamma_weights(tensor(0.0, 0.2, 0.4), tensor(-1.0, 0.0, -0.5), 2.0, 3.0, 3.0, 2.0)
    assert phi.tolist() == pytest.approx([1.0, 0.767814, 1.241538], abs=1e-6)
    extreme = vespo.gamma_weights(tensor(20.0, math.log(1e-8), math.nan), tensor(1.0, 1.0, 1.0), 2.0, 3.0, 3.0, 2.0)
    assert extreme.tolist() == pytest.approx([0.0, math.exp(3 - 3e-8) * 1e-16, 0.0], abs=1e-25)
    # A decay of 0 counts as 1e-4.
    floor = vespo.gamma_weights(tensor(1.0), tensor(1.0), 0.0, 0.0, 1.0, 1.0)
    assert floor.item() == pytest.approx(math.exp(1e-4 * (1 - math.e)))


def test_the_weight_of_a_sequence_is_bounded():
    batch = make_batch([[True, True], [True, False], []], [0.0] * 3)
    log_ratio = tensor(-30.0, 1.0, 50.0, 0.0)
    assert vespo.sequence_log_weight(log_ratio, None, batch).tolist() == [math.log(1e-8), 20.0, 0.0]


def test_kl_is_never_negative_in_float32():
    logprobs = torch.tensor([-1.0, -2.0, -0.3, -7.1])
    gaps = torch.tensor([1e-4, -1e-4, 3e-5, -2e-5])
    kl = kl_to_reference((logprobs + gaps) - logprobs)
    assert (kl >= 0).all()
