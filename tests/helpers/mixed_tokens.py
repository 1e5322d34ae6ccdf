"""A model that no flat layout can run."""

from __future__ import annotations

from typing import Any

import torch


def mixing(model: Any) -> Any:
    """The model with a layer whose attention mixes neighbouring tokens of its input."""
    attention = model.model.layers[0].self_attn
    plain = type(attention).forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed = hidden_states + torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return plain(attention, mixed, *args, **kwargs)

    attention.forward = forward
    return model
