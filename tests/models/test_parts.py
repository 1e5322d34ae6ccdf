"""RMS norms of training passes: rounded once, with the gradient of the formula, and the model as before afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from groupgrad.models.parts import compiled_parts, own_parts

KINDS: list[Any] = [LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm]
HALF_UNIT = 2.0**-24
"""What rounding a number to float32 once changes it by at most, relatively."""


def make(kind: Any, width: int = 48) -> Any:
    torch.manual_seed(0)
    norm = kind(width, eps=1e-5)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    return nn.Sequential(norm)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.double() * (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_gradients_are_those_of_float64(kind: Any):
    model = make(kind)
    x = (3 * torch.randn(2, 70, 4, 48)).requires_grad_()
    wide, weight = x.detach().double().requires_grad_(), model[0].weight.detach().double().requires_grad_()
    pull = torch.randn_like(x)
    with compiled_parts(model):
        found = model(x)
    expected = exact(wide, weight)
    assert ((found.double() - expected).abs() <= 1.001 * HALF_UNIT * expected.abs()).all(), "rounded once"
    grads = torch.autograd.grad(found, [x, model[0].weight], pull)
    wanted = torch.autograd.grad(expected, [wide, weight], pull.double())
    for grad, want in zip(grads, wanted):
        torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


def test_only_what_needs_a_gradient_gets_one():
    model = make(Qwen3RMSNorm)
    x = torch.randn(5, 48)
    with compiled_parts(model):
        model(x).sum().backward()
    of_weight, model[0].weight.grad = model[0].weight.grad, None
    model[0].weight.requires_grad_(False)
    x.requires_grad_()
    with compiled_parts(model):
        model(x).sum().backward()
    assert of_weight is not None and of_weight.abs().sum() > 0
    assert x.grad is not None and x.grad.abs().sum() > 0 and model[0].weight.grad is None


def test_modules_are_as_before_afterwards_also_on_errors():
    model, x = make(Qwen2RMSNorm), torch.randn(3, 48)
    before = model(x)
    with pytest.raises(ZeroDivisionError), compiled_parts(model):
        assert "forward" in model[0].__dict__
        raise ZeroDivisionError
    assert "forward" not in model[0].__dict__ and torch.equal(model(x), before)


def test_layers_that_are_computed_again_are_computed_alike():
    model, x = make(Qwen3RMSNorm), torch.randn(3, 48)
    model.gradient_checkpointing = True
    with compiled_parts(model), torch.no_grad():
        expected = model(x)
    with compiled_parts(model):
        pass
    assert torch.equal(model(x), expected)
    with compiled_parts(model):
        pass
    own_parts(model)
    assert "forward" not in model[0].__dict__


def test_a_pass_in_between_leaves_norms_that_are_computed_again_later():
    model, x = make(Qwen3RMSNorm), torch.randn(3, 48)
    model.gradient_checkpointing = True
    with compiled_parts(model):
        kept = model[0].__dict__["forward"]
    with torch.no_grad(), compiled_parts(model):
        model(x)
    assert model[0].__dict__["forward"] is kept


@pytest.mark.parametrize("is_flagged", [False, True])
def test_somebody_elses_checkpointing_computes_again_what_it_saved(is_flagged: bool):
    model, x = make(Qwen3RMSNorm), torch.randn(3, 48, requires_grad=True)
    model.gradient_checkpointing = is_flagged
    with compiled_parts(model):
        found = checkpoint(model, x, use_reentrant=False)
    (grad,) = torch.autograd.grad(found.square().sum(), x)
    own_parts(model)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


def compiled(model: Any) -> None:
    model.compile()


def half(model: Any) -> None:
    model.bfloat16()


def replaced(model: Any) -> None:
    model[0].forward = lambda hidden: hidden


def other_formula(model: Any) -> None:
    model[0] = GemmaRMSNorm(48)


@pytest.mark.parametrize("change", [compiled, half, replaced, other_formula])
def test_what_it_may_not_touch_is_left_alone(change: Any):
    model = make(Qwen3RMSNorm)
    change(model)
    before = model[0].__dict__.get("forward")
    with compiled_parts(model):
        assert model[0].__dict__.get("forward") is before


def test_mixed_precision_is_left_to_the_module_itself():
    model, x = make(LlamaRMSNorm), torch.randn(4, 48)
    expected = model(x)
    with compiled_parts(model), torch.autocast("cpu"):
        assert torch.equal(model(x), expected)
    with compiled_parts(model):
        assert not torch.equal(model(x), expected)


def test_other_numbers_than_float32_go_through_the_module_itself():
    model, x = make(LlamaRMSNorm), torch.randn(4, 48, dtype=torch.float64)
    expected = model(x)
    with compiled_parts(model):
        assert torch.equal(model(x), expected)
