"""LoRA adapters of small models, and what models with adapters compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from groupgrad.scoring.forward import ForwardOptions, score_without_gradient


def lora(**changes: Any) -> Any:
    """A configuration of an adapter that changes what the model computes."""
    import peft

    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**settings, **changes})


def logprobs(model: nn.Module, batch: Any) -> torch.Tensor:
    return score_without_gradient(model, batch, ForwardOptions()).logprobs
