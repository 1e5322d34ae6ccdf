"""Which decoders in bfloat16 compute in float32 on a CPU, and that nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from groupgrad import kernels
from groupgrad.kernels import library, status
from groupgrad.scoring.fused_modules import compiled_parts, computes_in_float32
from groupgrad.scoring.rounding import Rounding
from groupgrad.scoring.tiled_head import OutputHead

pytestmark = pytest.mark.skipif(library() is None, reason=status())

IDS = torch.tensor([[5, 6, 7, 8]])
SIZES: dict[str, Any] = {"vocab_size": 40, "num_attention_heads": 2, "num_hidden_layers": 1}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=24, **SIZES)).bfloat16()


def subclassed(model: Any) -> None:
    class Linear(nn.Linear):
        pass

    model.lm_head.__class__ = Linear


def replaced(model: Any) -> None:
    model.model.norm.forward = model.model.norm.forward


def mixed_up(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.half()


def compiled(model: Any) -> None:
    model.model.compile()


def widened(model: Any) -> None:
    model.float()


@pytest.mark.parametrize("change", [subclassed, replaced, mixed_up, compiled, widened])
def test_others_compute_in_the_type_of_their_weights(change: Callable[[Any], None]):
    model = llama()
    assert computes_in_float32(model)
    change(model)
    assert not computes_in_float32(model)
    expected = torch.finfo(torch.float32 if change is widened else torch.bfloat16).eps  # the coarsest one
    assert Rounding.of(model).eps == expected
    if change in (compiled, mixed_up):
        return  # compiling takes long, and a model of both halves does not run at all
    with compiled_parts(model), torch.no_grad():
        found = model(IDS).logits
    assert found.dtype == model.dtype
    assert torch.equal(found, model(IDS).logits) or change is widened


def test_an_unknown_family_computes_in_bfloat16():
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=40)).bfloat16().eval()
    assert not computes_in_float32(model)
    with compiled_parts(model), torch.no_grad():
        assert torch.equal(model(IDS).logits, model(IDS).logits) and model(IDS).logits.dtype == torch.bfloat16


def test_without_kernels_it_computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch):
    model = llama()
    monkeypatch.setenv("GROUPGRAD_NATIVE_KERNELS", "0")
    assert kernels.library() is None and not computes_in_float32(model)
    with compiled_parts(model), torch.no_grad():
        assert model(IDS).logits.dtype == torch.bfloat16


def test_under_autocast_it_computes_in_its_type():
    model = llama()
    with torch.autocast("cpu", torch.bfloat16), compiled_parts(model), torch.no_grad():
        assert model(IDS).logits.dtype == torch.bfloat16
    assert Rounding.of(model, lambda: torch.autocast("cpu", torch.bfloat16)).is_half
    assert not Rounding.of(model).is_half


def test_under_lora_it_computes_in_float32_too():
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(llama(), config)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    assert computes_in_float32(model)
    with compiled_parts(model):
        assert computes_in_float32(model), "while its parts are replaced too"
        logits = model(IDS).logits
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for n, p in model.named_parameters() if "lora_" in n)


def test_where_hooks_see_saved_tensors_the_modules_compute_themselves():
    """As checkpointing by other code: what is computed again saves what was saved before."""
    model = llama()
    plain = copy.deepcopy(model)(IDS).logits
    with compiled_parts(model), torch.autograd.graph.save_on_cpu():
        logits = model(IDS).logits
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, plain)


def test_the_whole_head_at_once_takes_states_in_float32_as_they_are():
    torch.manual_seed(0)
    states, weight, bias = torch.randn(3, 16), torch.randn(5, 16).bfloat16(), torch.randn(5).bfloat16()
    expected = states.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(OutputHead(weight, bias).output(states).double(), expected, rtol=1e-5, atol=1e-5)
    assert OutputHead(weight, bias).output(states.bfloat16()).dtype == torch.bfloat16
