"""The weight of the load-balancing loss, for models with and without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from groupgrad.scoring.forward import ForwardOptions
from groupgrad.scoring.self_check import configured_aux_loss_weight, effective_aux_loss_weight

OPTIONS = ForwardOptions()


@pytest.fixture
def silent() -> Any:
    """Experts without a load-balancing loss."""
    torch.manual_seed(0)
    config = Lfm2MoeConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        num_dense_layers=1,
        layer_types=["conv", "full_attention"],
    )
    return Lfm2MoeForCausalLM(config).eval()


def test_the_weight_is_the_users_or_the_models_own(build: Any) -> None:
    assert configured_aux_loss_weight(build("qwen3-moe", router_aux_loss_coef=0.25), None) == 0.25
    assert configured_aux_loss_weight(build("qwen3-moe", router_aux_loss_coef=0.25), 0.5) == 0.5
    assert configured_aux_loss_weight(build("qwen3-moe", router_aux_loss_coef=0.25), 0.0) == 0.0
    assert configured_aux_loss_weight(build("qwen3"), None) == configured_aux_loss_weight(build("qwen3"), 0.0) == 0.0
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.5, but Qwen3ForCausalLM tells of no routed experts"):
        configured_aux_loss_weight(build("qwen3"), 0.5)


def test_a_model_with_the_loss_keeps_its_weight(build: Any) -> None:
    model = build("qwen3-moe").train()
    assert effective_aux_loss_weight(model, OPTIONS, 0.25, None) == 0.25
    assert effective_aux_loss_weight(model, OPTIONS, 0.25, 0.25) == 0.25
    assert effective_aux_loss_weight(model, OPTIONS, 0.0, 0.0) == 0.0
    assert model.training


def test_a_model_without_the_loss_gets_weight_0_or_an_error(silent: Any) -> None:
    assert effective_aux_loss_weight(silent, OPTIONS, 0.001, None) == 0.0
    with pytest.raises(
        ValueError, match=r"router_aux_loss_coef=0.1, but Lfm2MoeForCausalLM computes no load-balancing"
    ):
        effective_aux_loss_weight(silent, OPTIONS, 0.1, 0.1)
