"""Scores and gradients of tiles of logits by the compiled kernels, with the sums that sampling makes."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

BITS = math.log2(math.e)
"""Bits in a nat."""

_LOWEST = -1e30
"""Peak of nothing; see `chances.h`."""


class _Tile(ctypes.Structure):
    """See `head.cpp`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "count", "first")),
        ("factor", ctypes.c_float),
        *(
            (name, ctypes.c_void_p)
            for name in ("tokens", "sums", "chosen", "normaliser", "of_chances", "of_token", "of_bits")
        ),
    )


@dataclass(slots=True)
class ExactSums:
    """What has been seen of some tokens' distributions, the vocabulary's tiles in order."""

    sums: torch.Tensor
    """(n, 3) float64: peaks in bits, and totals and moments relative to them."""
    chosen: torch.Tensor
    """(n,) the tokens' own logits in bits; NaN until they are seen."""

    @classmethod
    def of_nothing(cls, num_tokens: int) -> ExactSums:
        """Before the first tile."""
        start = torch.tensor([_LOWEST, 0.0, 0.0], dtype=torch.float64, device="cpu")
        return cls(start.repeat(num_tokens, 1), start.new_full((num_tokens,), math.nan, dtype=torch.float32))

    def at(self, rows: slice) -> ExactSums:
        """Of some of the tokens, in the same memory."""
        return ExactSums(self.sums[rows], self.chosen[rows])

    def normaliser(self) -> torch.Tensor:
        """(n,) float64, in bits."""
        return self.sums[:, 0] + self.sums[:, 1].log2()

    def finish(self, kernels: ctypes.CDLL) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs and entropies in nats, normalisers in bits, each (n,) float32."""
        found = self.chosen.new_empty(3, len(self.chosen))
        pointers = (x.data_ptr() for x in found)
        kernels.groupgrad_finish(self.sums.data_ptr(), self.chosen.data_ptr(), len(self.chosen), *pointers)
        logprobs, entropy, normaliser = found
        return logprobs, entropy, normaliser


@dataclass(slots=True, frozen=True)
class Wanted:
    """What becomes of a tile: for each probability p = 2^(bits - normaliser) the tile gets p * (of_chances + of_bits *
    (bits - normaliser)), and of_token more for each row's own token, or 0 if that is None. All (t,) float32."""

    normaliser: torch.Tensor
    of_chances: torch.Tensor
    of_token: torch.Tensor | None = None
    of_bits: torch.Tensor | None = None


def pass_tile(
    kernels: ctypes.CDLL,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    first: int,
    factor: float,
    *,
    sums: ExactSums | None = None,
    wanted: Wanted | None = None,
) -> None:
    """Go over a tile of logits (t, v) float32 once: add what is seen to `sums` and overwrite the tile as `wanted`.

    `tokens` (t,) are ids, `first` that of the first column; logits times `factor` are in bits.
    """
    given = (sums and sums.sums, sums and sums.chosen)
    asked = (None,) * 4 if wanted is None else (wanted.normaliser, wanted.of_chances, wanted.of_token, wanted.of_bits)
    kept = [None if x is None else x.contiguous() for x in (tokens.to(torch.int64), *asked)]
    pointers = [None if x is None else x.data_ptr() for x in (kept[0], *given, *kept[1:])]
    tile = _Tile(logits.data_ptr(), *logits.shape, first, factor, *pointers)
    kernels.groupgrad_tile(ctypes.addressof(tile), torch.get_num_threads())
