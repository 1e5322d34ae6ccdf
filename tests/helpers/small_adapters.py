"""Adapters of small models, and what models with adapters compute."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import nn

from groupgrad.scoring.forward import ForwardOptions, score_without_gradient

QV = ["q_proj", "v_proj"]
KINDS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=QV),
    "rsLoRA on all layers": lambda: peft.LoraConfig(
        r=4, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM"
    ),
    "LoRA on the head, with dropout": lambda: peft.LoraConfig(r=4, target_modules=[*QV, "lm_head"], lora_dropout=0.3),
    "biases": lambda: peft.LoraConfig(r=4, target_modules=QV, bias="all"),
    "PiSSA": lambda: peft.LoraConfig(r=4, target_modules=QV, init_lora_weights="pissa"),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=QV, use_dora=True),
    "whole head": lambda: peft.LoraConfig(r=4, target_modules=QV, modules_to_save=["lm_head"]),
    "some tokens": lambda: peft.LoraConfig(r=4, target_modules=QV, trainable_token_indices=[5, 30, 31, 32]),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "experts": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
}
"""Configurations of adapters for a Qwen3 model; the last one for experts."""


def lora(**changes: Any) -> Any:
    """A configuration of an adapter that changes what the model computes."""
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**settings, **changes})


def logprobs(model: nn.Module, batch: Any) -> torch.Tensor:
    return score_without_gradient(model, batch, ForwardOptions()).logprobs
