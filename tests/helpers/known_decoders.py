"""Small models of the families whose decode steps have a direct form."""

from __future__ import annotations

from typing import Any

import base_fixtures
import pytest
import torch

from groupgrad.engines.native.attention_layouts import ProbeLayout
from groupgrad.engines.native.cpp_step import CompiledModel
from groupgrad.engines.native.direct_step import DirectModel, direct_model
from groupgrad.engines.native.logits import last_logits
from groupgrad.scoring.forward import evaluation_mode

SIZES: dict[str, Any] = {**base_fixtures.SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
}


def direct_form(model: Any) -> CompiledModel | DirectModel | str:
    """Returns the form of decode steps that the native engine finds for a model."""
    attention, token = ProbeLayout(), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad(), evaluation_mode(model):
        last_logits(model, token, token, attention, token)
        return direct_model(model, attention.calls)


def make(family: str, *, adapted: bool = False, **changes: Any) -> Any:
    """A model of two layers with random weights, and with an adapter, if asked for."""
    model = base_fixtures.build_family(family, **{**SIZES, **CHANGES[family], **changes})
    if adapted:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
    return model
