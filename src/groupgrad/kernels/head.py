"""Scores and gradients of tiles of logits by the compiled kernels, with the same sums as in sampling."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

BITS = math.log2(math.e)
"""Bits in a nat."""

_LOWEST = -1e30
"""Peak of an empty sum; see `softmax.h`."""


class _Tile(ctypes.Structure):
    """Mirrors `Tile` of `head.cpp`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "count", "first")),
        ("factor", ctypes.c_float),
        *(
            (name, ctypes.c_void_p)
            for name in ("tokens", "sums", "chosen", "normaliser", "prob_factor", "token_gradient", "bits_factor")
        ),
    )


@dataclass(slots=True)
class SoftmaxSums:
    """Running softmax sums of some tokens' distributions, over the vocabulary's tiles in order."""

    sums: torch.Tensor
    """(n, 3) float64: the peak in bits, then the sum of 2^(bits - peak), and that sum weighted by bits - peak."""
    chosen: torch.Tensor
    """(n,) the tokens' own logits in bits; NaN before their tile."""

    @classmethod
    def empty(cls, num_tokens: int) -> SoftmaxSums:
        """The sums before the first tile."""
        start = torch.tensor([_LOWEST, 0.0, 0.0], dtype=torch.float64, device="cpu")
        return cls(start.repeat(num_tokens, 1), start.new_full((num_tokens,), math.nan, dtype=torch.float32))

    def at(self, rows: slice) -> SoftmaxSums:
        """The sums of some of the tokens, in the same memory."""
        return SoftmaxSums(self.sums[rows], self.chosen[rows])

    def normaliser(self) -> torch.Tensor:
        """(n,) float64, in bits."""
        return self.sums[:, 0] + self.sums[:, 1].log2()

    def finish(self, kernels: ctypes.CDLL) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs and entropies in nats, normalisers in bits, each (n,) float32."""
        results = self.chosen.new_empty(3, len(self.chosen))
        pointers = (x.data_ptr() for x in results)
        kernels.groupgrad_finish(self.sums.data_ptr(), self.chosen.data_ptr(), len(self.chosen), *pointers)
        logprobs, entropy, normaliser = results
        return logprobs, entropy, normaliser


@dataclass(slots=True, frozen=True)
class TileGradient:
    """Vectors (t,) float32 from which the kernel computes the gradient that overwrites a tile.

    With p = 2^(bits - normaliser) a logit becomes p * (prob_factor + bits_factor * (bits - normaliser)). The row's own
    token becomes `token_gradient`, or 0 if that is None.
    """

    normaliser: torch.Tensor
    prob_factor: torch.Tensor
    token_gradient: torch.Tensor | None = None
    bits_factor: torch.Tensor | None = None


def pass_tile(
    kernels: ctypes.CDLL,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    first: int,
    factor: float,
    *,
    sums: SoftmaxSums | None = None,
    gradient: TileGradient | None = None,
) -> None:
    """Reads a tile of logits (t, v) float32 once: adds it to `sums`, and overwrites it with `gradient`.

    `tokens` (t,) are ids, `first` is the id of the first column, and logits times `factor` are in bits.
    """
    inputs = [tokens.to(torch.int64).contiguous(), sums and sums.sums, sums and sums.chosen]
    if gradient is not None:
        vectors = (gradient.normaliser, gradient.prob_factor, gradient.token_gradient, gradient.bits_factor)
        inputs += [None if x is None else x.contiguous() for x in vectors]
    pointers = [None if x is None else x.data_ptr() for x in inputs]
    tile = _Tile(logits.data_ptr(), *logits.shape, first, factor, *pointers)
    kernels.groupgrad_tile(ctypes.addressof(tile), torch.get_num_threads())
