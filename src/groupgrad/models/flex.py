"""The shared layout's attention by torch's flex attention, which on a GPU compiles one kernel for it.

Used for half-precision tensors on CUDA; everything else takes the matrix products of `blocks.py`, and so does a device
on which the kernel cannot be compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from groupgrad.models.attention import AttentionCall

logger = logging.getLogger(__name__)

_BLOCK = 128
"""Tokens on each side of a tile of the mask; tiles that nothing is seen in cost nothing."""


@dataclass(slots=True)
class TokenPlaces:
    """Where each flat token belongs, all (T,) int64."""

    row: torch.Tensor
    """Its row; prompts are rows too."""
    prompt: torch.Tensor
    """The row of its prompt, or its own row if it has none."""
    position: torch.Tensor
    """Its place in its row, the prompt counted."""
    _masks: dict[int | None, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> TokenPlaces:
        """The same on `device`."""
        return TokenPlaces(self.row.to(device), self.prompt.to(device), self.position.to(device))

    def sees(self, window: int | None) -> Callable[..., torch.Tensor]:
        """Which keys a query sees, as flex attention asks for it."""

        def rule(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            related = (self.row[query] == self.row[key]) | (self.prompt[query] == self.row[key])
            distance = self.position[query] - self.position[key]
            seen = related & (distance >= 0)
            return seen if window is None else seen & (distance < window)

        return rule

    def mask(self, window: int | None) -> Any:
        """The same mask object for every layer of a pass."""
        if window not in self._masks:
            size = self.row.shape[0]
            device = self.row.device
            # Compiled, it never holds the (T, T) pairs.
            make = _compiled("create_block_mask") if device.type == "cuda" else _plain("create_block_mask")
            self._masks[window] = make(self.sees(window), None, None, size, size, device=device, BLOCK_SIZE=_BLOCK)
        return self._masks[window]


class _State:
    """Whether the kernel has failed on this machine."""

    failed = False


def is_usable(query: torch.Tensor, call: AttentionCall) -> bool:
    """True if flex attention is the faster way: half precision on CUDA, without sinks."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and half and call.sinks is None and not _State.failed


def attend_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: TokenPlaces, call: AttentionCall
) -> torch.Tensor | None:
    """(T, Hq, D) outputs for query (Hq, T, D), key and value (Hkv, T, D); None, and one warning, if it cannot run.

    Differentiable in all three.
    """
    softcap = call.softcap

    def capped(score: torch.Tensor, *_places: Any) -> torch.Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    try:
        kernel = _compiled("flex_attention") if query.device.type == "cuda" else _plain("flex_attention")
        output: Any = kernel(
            query[None],
            key[None],
            value[None],
            score_mod=None if softcap is None else capped,
            block_mask=places.mask(call.window),
            scale=call.scale,
            enable_gqa=query.shape[0] != key.shape[0],
        )
    except Exception as error:  # whatever the compiler says: there is another way
        if isinstance(error, torch.OutOfMemoryError):
            raise
        _State.failed = True
        logger.warning("flex attention cannot run here (%s: %s); matrix products do", type(error).__name__, error)
        return None
    return output[0].transpose(0, 1)


def _plain(name: str) -> Any:
    # Imported when needed: it brings the compiler along, which takes a while.
    from torch.nn.attention import flex_attention

    return getattr(flex_attention, name)


@cache
def _compiled(name: str) -> Any:
    return torch.compile(_plain(name), dynamic=True)
