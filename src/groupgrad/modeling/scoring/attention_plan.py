"""Defines the attention plan, an object that computes attention for one layout of flat tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from groupgrad.modeling.scoring.recurrence import Recurrence


@dataclass(slots=True, frozen=True)
class AttentionCall:
    """Options of one layer's attention."""

    layer: int
    """Index of the layer in the model."""
    scale: float
    """Multiplies the products of queries and keys."""
    softcap: float | None = None
    """Scores become cap * tanh(score / cap) if set."""
    window: int | None = None
    """A query attends to keys less than this many positions before it; None: to all of them."""
    sinks: torch.Tensor | None = None
    """(Hq,) one more logit per head in the softmax's denominator."""
    dropout: float = 0.0
    """Dropout probability of attention weights; 0 in evaluation mode."""
    source: int | None = None
    """The earlier layer whose keys and values this layer reads, as some layers of Gemma 4 do; None: it has its own."""


class AttentionPlan(Protocol):
    """Computes attention between the tokens of a flat (1, T) input."""

    @property
    def recurrence(self) -> Recurrence:
        """The order of the tokens in recurrent layers; asked for only if the model has some."""
        ...

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, E) outputs from query (Hq, T, D), key (Hkv, T, D) and value (Hkv, T, E), where Hkv divides Hq."""
        ...
