"""Gradients of half-precision weights are summed in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from groupgrad.trainer.gradients import GradientSums

PASSES = 64


def make_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(dtype)
    model[2].bias.requires_grad_(False)
    return model


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=stream).to(dtype) for _ in range(PASSES)]


def train(model: nn.Module, sums: GradientSums, batches: list[torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The gradients after a step of these micro-batches."""
    for index, batch in enumerate(batches):
        with sums.passes(is_last=index == len(batches) - 1):
            model(batch).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def of_passes(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """The gradient of each pass alone."""
    found: dict[str, list[torch.Tensor]] = {}
    for batch in batches:
        model.zero_grad()
        model(batch).square().mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found.setdefault(name, []).append(parameter.grad.clone())
    model.zero_grad()
    return found


def test_the_sum_of_many_passes_is_rounded_once():
    """Added up in bfloat16 the same gradients are off by many times as much."""
    model = make_model()
    parts = of_passes(model, inputs())
    gradients: dict[str, Any] = train(model, GradientSums(model, in_float32=True), inputs())
    plain: dict[str, Any] = train(twin := make_model(), GradientSums(twin, in_float32=False), inputs())
    assert gradients["2.bias"] is None
    for name, of_each in parts.items():
        exact = torch.stack(of_each).double().sum(0)
        in_float32 = torch.stack(of_each).float().cumsum(0)[-1]
        assert torch.equal(gradients[name], in_float32.bfloat16()), name
        error, plain_error = (float((g[name].double() - exact).norm()) for g in (gradients, plain))
        assert plain_error > 3 * error > 0


def test_weights_in_float32_keep_their_own_gradients():
    model, twin = make_model(torch.float32), make_model(torch.float32)
    sums = GradientSums(model, in_float32=True)
    assert all(holder is parameter for holder, parameter in zip(sums.holders, model.parameters()))
    gradients = train(model, sums, inputs(torch.float32))
    expected = train(twin, GradientSums(twin, in_float32=False), inputs(torch.float32))
    for name, gradient in expected.items():
        assert gradient is None or torch.equal(gradients[name], gradient)  # pyright: ignore[reportArgumentType]


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
