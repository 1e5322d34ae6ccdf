"""Finds the term of the loss, and the token, that is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch


@dataclass(slots=True, frozen=True)
class TokenTerms:
    """The numbers that a loss is made of, for each completion token of some rows."""

    row_index: torch.Tensor | None
    """(B,) int64, the rows' numbers in the generation batch; None where they have none."""
    offsets: torch.Tensor
    """(B+1,) int64, where each row's tokens begin."""
    trained: torch.Tensor
    """(L,) bool, loss tokens."""
    values: Mapping[str, torch.Tensor]
    """Term -> (L,) detached, causes before what is computed from them."""


@dataclass(slots=True, frozen=True)
class NonFiniteToken:
    """The first loss token of a row at which a term of the loss is not finite."""

    term: str
    """Key of `TokenTerms.values`."""
    token: int
    """Index in the completion, from 0."""
    numbers: dict[str, float]
    """All terms at that token."""


def nonfinite_tokens(parts: Sequence[TokenTerms]) -> dict[int, NonFiniteToken]:
    """Row number -> the first term that is not finite in it, in the order of `values`. Waits for the device.

    Rows without a number count on from 0 in the order in which they come.
    """
    found: dict[int, NonFiniteToken] = {}
    first = 0
    for part in parts:
        starts = _integers(part.offsets)
        index = list(range(first, first + len(starts) - 1)) if part.row_index is None else _integers(part.row_index)
        first += len(index)
        for term, values in part.values.items():
            bad = part.trained & ~values.isfinite()
            for place in _integers(bad.nonzero().flatten()):
                row = int(torch.searchsorted(part.offsets, place, right=True)) - 1
                if index[row] not in found:
                    numbers = {name: float(one[place]) for name, one in part.values.items()}
                    found[index[row]] = NonFiniteToken(term, place - starts[row], numbers)
    return found


def _integers(values: torch.Tensor) -> list[int]:
    return cast(list[int], values.tolist())  # pyright: ignore[reportUnknownMemberType]
