"""The cost of attention beside that of linear layers, worked by hand for small models."""

from __future__ import annotations

from typing import Any

import known_decoders
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3MoeConfig, Qwen3NextConfig

from groupgrad.scoring.attention_cost import attention_cost

SIZES: dict[str, Any] = {**known_decoders.SIZES, "vocab_size": 50}
PROJECTIONS = 16 * 32 + 2 * 16 * 16 + 32 * 16
"""Weights of queries, keys, values and outputs of a layer."""


def cost_of(config):
    with torch.device("meta"):
        return attention_cost(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_decoder(tied):
    """The queries of a token have 32 numbers in each of two layers; a tied head is a product all the same."""
    layer = PROJECTIONS + 3 * 16 * 24 + 2 * 16
    weights = 2 * layer + 16 + 50 * 16
    assert cost_of(LlamaConfig(**SIZES, tie_word_embeddings=tied)) == pytest.approx(2 * 2 * 32 / weights)


def test_layers_with_a_window_or_a_state_count_nothing():
    hybrid = Qwen3NextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hybrid)
    weights = sum(parameter.numel() for parameter in model.parameters()) - 50 * 16
    assert attention_cost(model) == pytest.approx(2 * 32 / weights)


def test_experts_that_a_token_does_not_choose_count_nothing():
    sizes = {**SIZES, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    found = cost_of(Qwen3MoeConfig(**sizes, num_experts=8))
    norms, router = 2 * 16 + 2 * 8, 8 * 16
    layer = PROJECTIONS + norms + router + 2 * 3 * 16 * 8
    assert found == pytest.approx(2 * 2 * 32 / (2 * layer + 16 + 50 * 16))


def test_parameters_that_are_empty_under_zero_3():
    """DeepSpeed leaves their shape and number in other fields."""
    with torch.device("meta"):
        sizes = {**SIZES, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, num_experts=8))
    whole = attention_cost(model)
    for parameter in model.parameters():
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.data = torch.empty(0, device="meta")
    assert attention_cost(model) == whole


def test_latent_attention_has_queries_and_values_of_unlike_width():
    """Queries have 8 + 4 numbers a head and values 6: (12 + 6) / 2 in each of four heads and two layers."""
    sizes = {name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes, **latent, first_k_dense_replace=2))
    weights = sum(parameter.numel() for parameter in model.parameters()) - 50 * 16
    assert attention_cost(model) == pytest.approx(2 * 2 * 4 * 9 / weights)


def test_a_model_without_sizes():
    assert attention_cost(torch.nn.Linear(2, 2)) == 0.0
