"""The weight of the load-balancing loss of mixture-of-experts models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from groupgrad.models.unwrapping import base_model, unwrap
from groupgrad.scoring.forward import ForwardOptions, evaluation_mode, score_tokens
from groupgrad.scoring.self_check import random_batch


def configured_aux_loss_weight(model: Any, requested: float | None) -> float:
    """The weight that the user requested, else the model config's; 0 for models without routed experts.

    ValueError if a weight is requested for a model without routed experts.
    """
    text = model.config.get_text_config() if hasattr(getattr(model, "config", None), "get_text_config") else None
    # Granite 4's small models have the configuration of a mixture of experts, with none.
    has_router = hasattr(text, "output_router_logits") and getattr(text, "num_local_experts", None) != 0
    if requested is None:
        return float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0) if has_router else 0.0
    if requested and not has_router:
        raise ValueError(
            f"router_aux_loss_coef={requested}, but {type(model).__name__} tells of no routed experts to balance; "
            "leave it out or set it to 0"
        )
    return float(requested)


def effective_aux_loss_weight(
    model: nn.Module,
    options: ForwardOptions,
    weight: float,
    requested: float | None,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """`weight`, or 0 for a model that returns no load-balancing loss on random tokens.

    Many configs have a weight for a loss that their model never computes. ValueError if the user requested a weight for
    such a model. Random streams, module modes and gradients stay as they are.
    """
    if weight == 0.0:
        return 0.0
    aux_loss = None
    try:
        with torch.no_grad(), evaluation_mode(model), precision():
            batch = random_batch(model)
            aux_loss = score_tokens(model, batch, replace(options, layout="dense", aux_loss=True)).aux_loss
    except TypeError:  # the forward method has no parameter `output_router_logits`
        pass
    if aux_loss is not None and float(aux_loss) > 0.0:
        return weight
    if requested:
        raise ValueError(
            f"router_aux_loss_coef={requested}, but {type(base_model(unwrap(model))).__name__} computes no "
            "load-balancing loss, whatever its configuration says; leave router_aux_loss_coef out or set it to 0"
        )
    return 0.0
