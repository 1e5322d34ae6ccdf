"""Finds the term of the loss, and the token, that is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from groupgrad.batch import integers


@dataclass(slots=True, frozen=True)
class TokenTerms:
    """The numbers that a loss is made of, for each completion token of some rows."""

    step_row: torch.Tensor | None
    """(B,) int64, the rows' places in the batch of the step; None outside a step."""
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
    """Place in the step's batch -> the row's first term, in the order of `values`, that is not finite.

    Waits for the device.
    """
    found: dict[int, NonFiniteToken] = {}
    for part in parts:
        if part.step_row is None:
            continue
        starts, places = integers(part.offsets), integers(part.step_row)
        for term, values in part.values.items():
            bad = part.trained & ~values.isfinite()
            for token in integers(bad.nonzero().flatten()):
                row = int(torch.searchsorted(part.offsets, token, right=True)) - 1
                if places[row] not in found:
                    numbers = {name: float(one[token]) for name, one in part.values.items()}
                    found[places[row]] = NonFiniteToken(term, token - starts[row], numbers)
    return found
