"""The weight of a mixture of experts' load-balancing loss, and whether the model tells that loss at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from groupgrad.modeling.scoring.forward import ForwardOptions, evaluation_mode, score_tokens, unwrap
from groupgrad.modeling.self_check import random_batch


def configured_aux_loss_weight(model: Any, asked: float | None) -> float:
    """The weight that the user `asked` for, or the model's own; 0 for other models. ValueError if one is asked for of a
    model without experts that could be balanced."""
    text = model.config.get_text_config() if hasattr(getattr(model, "config", None), "get_text_config") else None
    has_router = hasattr(text, "output_router_logits")
    if asked is None:
        return float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0) if has_router else 0.0
    if asked and not has_router:
        raise ValueError(
            f"router_aux_loss_coef={asked}, but {type(model).__name__} tells of no routed experts to balance; leave it "
            "out or set it to 0"
        )
    return float(asked)


def effective_aux_loss_weight(
    model: nn.Module,
    options: ForwardOptions,
    weight: float,
    asked: float | None,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """The weight of the load-balancing loss: `weight`, or 0 for a model that gives none on random tokens.

    Many configurations have a weight of that loss that their model never computes. ValueError if the user `asked` for
    one of such a model. No state is touched.
    """
    if weight == 0.0:
        return 0.0
    found = None
    try:
        with torch.no_grad(), evaluation_mode(model), precision():
            batch = random_batch(model)
            found = score_tokens(model, batch, replace(options, layout="dense", aux_loss=True)).aux_loss
    except TypeError:  # the model does not take the argument that asks for it
        pass
    if found is not None and float(found) > 0.0:
        return weight
    if asked:
        inner: Any = unwrap(model)
        name = type(inner.get_base_model() if hasattr(inner, "get_base_model") else inner).__name__
        raise ValueError(
            f"router_aux_loss_coef={asked}, but {name} computes no load-balancing loss, whatever its configuration "
            "says; leave router_aux_loss_coef out or set it to 0"
        )
    return 0.0
