"""Finds models that need all tokens of a row on one rank, so `context_parallel_size` cannot split it over ranks."""

from __future__ import annotations

from torch import nn

from groupgrad.integrations.recurrent.recurrent_layers import recurrent_classes
from groupgrad.models.unwrapping import is_multimodal, pretrained
from groupgrad.scoring.attention import attention_dropout


def whole_rows_reason(model: nn.Module, padded_because: str | None, *, aux_loss: bool) -> str | None:
    """Says why the tokens of a row of `model` cannot be on several ranks, and what to set; None if they can.

    `padded_because` says why the model runs on padded rows only; None if it does not.
    """
    inner = pretrained(model)
    if is_multimodal(model):
        return "this model takes images, whose tokens must stay together. Set context_parallel_size=1"
    if inner is not None and recurrent_classes(inner):
        return "this model has recurrent layers, which pass a state on from token to token. Set context_parallel_size=1"
    if padded_because is not None:
        return f"this model runs on padded rows only: {padded_because}. Set context_parallel_size=1"
    if dropout := attention_dropout(model):
        return f"this model has an attention dropout of {dropout:g}. Set disable_dropout=True"
    if aux_loss:
        return "this model's load-balancing loss counts all tokens of a pass. Set router_aux_loss_coef=0"
    return None
