"""Gradients of a step: float32 sums, rounded once, and deterministic sums on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import deterministic

from groupgrad.trainer.gradients import GradientSums, deterministic_cpu


def make_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(dtype)
    model[2].bias.requires_grad_(False)
    return model


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=stream).to(dtype) for _ in range(4)]


def train(model: nn.Module, sums: GradientSums, batches: list[torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The gradients after a step of these micro-batches."""
    for index, batch in enumerate(batches):
        with sums.passes(is_last=index == len(batches) - 1):
            model(batch).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_during_a_step_there_are_float32_sums_alone_and_afterwards_rounded_gradients_alone():
    model = make_model()
    sums = GradientSums(model, in_float32=True)
    assert sum(holder.untyped_storage().nbytes() for holder in sums.holders) == 4 * len(sums.holders)
    with sums.passes(is_last=False):
        model(inputs()[0]).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {holder.grad.dtype for holder in sums.holders if holder.grad is not None} == {torch.float32}
    with sums.passes(is_last=True):
        model(inputs()[1]).sum().backward()
    assert all(holder.grad is None for holder in sums.holders)
    model(inputs()[2]).sum().backward()
    assert all(holder.grad is None for holder in sums.holders), "other passes are left alone"


def test_a_failed_micro_batch_keeps_the_sums_and_clear_drops_them():
    model = make_model()
    sums = GradientSums(model, in_float32=True)
    with pytest.raises(RuntimeError, match="not this one"), sums.passes(is_last=True):
        model(inputs()[0]).sum().backward()
        raise RuntimeError("not this one")
    assert all(parameter.grad is None for parameter in model.parameters())
    sums.clear()
    gradients: dict[str, Any] = train(model, sums, inputs()[:1])
    twin = make_model()
    for name, gradient in train(twin, GradientSums(twin, in_float32=False), inputs()[:1]).items():
        assert gradient is None or torch.equal(gradients[name], gradient)


def setting() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )


def test_the_setting_holds_inside_and_is_restored_also_on_errors():
    """The user's setting stays, and models elsewhere are left alone."""
    before = setting()
    with pytest.raises(ZeroDivisionError), deterministic_cpu(nn.Linear(2, 2)):
        assert setting() == (True, True, False)
        raise ZeroDivisionError
    with deterministic_cpu(nn.Linear(2, 2, device="meta")):
        assert setting() == before
    assert setting() == before and not before[0]
    torch.use_deterministic_algorithms(True)
    try:
        before = setting()
        with deterministic_cpu(nn.Linear(2, 2)):
            assert setting() == before
        assert setting() == before
    finally:
        torch.use_deterministic_algorithms(False)


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
