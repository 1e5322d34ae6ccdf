"""The attention layout, which computes the attention of flat tokens, and the mask in which layers get it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Protocol

import torch

from groupgrad.scoring.recurrence import Recurrence


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


class AttentionLayout(Protocol):
    """Computes attention between the tokens of a flat (1, T) input."""

    @property
    def recurrence(self) -> Recurrence:
        """The order of the tokens in recurrent layers; asked for only if the model has some."""
        ...

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, E) outputs from query (Hq, T, D), key (Hkv, T, D) and value (Hkv, T, E), where Hkv divides Hq."""
        ...


class LayoutMask:
    """An attention layout passed to the layers of a model in place of the mask.

    It has the few attributes that model files read from a mask.
    """

    ndim = 0
    __iter__ = None  # with `__getitem__` alone, iterating would never end

    def __init__(self, attention: AttentionLayout):
        self.attention = attention
        self._layer_of: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Identity of a key tensor -> the tensor, and the first layer that has passed it."""

    def to(self, *_: object, **__: object) -> LayoutMask:
        """Returns itself. Model files call `to` to convert the dtype of a mask; a layout has none."""
        return self

    def __getitem__(self, _: object) -> LayoutMask:
        """Returns itself. Gemma 4 slices masks to the queries that logits are wanted for, which are all here."""
        return self

    def source(self, key: torch.Tensor, layer: int) -> int | None:
        """The earlier layer that has passed this very tensor of keys, as layers that share them do, or None."""
        tensor, first = self._layer_of.get(id(key), (None, layer))
        if tensor is None or tensor() is not key:
            self._layer_of[id(key)], first = (weakref.ref(key), layer), layer
        return None if first == layer else first
