"""Deterministic algorithms while a model trains on a CPU, and the earlier setting afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import deterministic

from groupgrad.trainer.gradients import deterministic_cpu


def setting() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )


def test_the_setting_holds_inside_and_is_restored_also_on_errors():
    before = setting()
    with pytest.raises(ZeroDivisionError), deterministic_cpu(nn.Linear(2, 2)):
        assert setting() == (True, True, False)
        raise ZeroDivisionError
    assert setting() == before and not before[0]


def test_the_users_setting_stays():
    torch.use_deterministic_algorithms(True)
    try:
        before = setting()
        with deterministic_cpu(nn.Linear(2, 2)):
            assert setting() == before
        assert setting() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_models_elsewhere_are_left_alone():
    with deterministic_cpu(nn.Linear(2, 2, device="meta")):
        assert not torch.are_deterministic_algorithms_enabled()


def test_gradients_with_one_index_are_summed_in_order():
    # Large and small values: another order gives other sums. Without the setting this fails in most repetitions.
    draw = torch.Generator().manual_seed(0)
    places, grad_output = torch.randint(40, (4000,), generator=draw), torch.randn(4000, 64, generator=draw)
    grad_output = grad_output * 10.0 ** torch.randint(-4, 5, grad_output.shape, generator=draw)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        actual = []
        for _ in range(50):
            states = torch.zeros(40, 64, requires_grad=True)
            with deterministic_cpu(nn.Linear(2, 2)):
                (grad,) = torch.autograd.grad(states[places], states, grad_output)
            actual.append(grad)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(grad, actual[0]) for grad in actual)
