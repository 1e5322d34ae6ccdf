"""Sums and means over the rows of a ragged micro-batch, and the two kinds of value it has: one a token, one a row.

The two kinds are types of their own, so that a (B,) tensor is never broadcast against a (L,) one by accident.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.batch import Batch


@dataclass(slots=True, frozen=True)
class PerToken:
    """One value a completion token."""

    values: torch.Tensor
    """(L,)."""


@dataclass(slots=True, frozen=True)
class PerRow:
    """One value a completion."""

    values: torch.Tensor
    """(B,)."""


def token_advantages(batch: Batch) -> torch.Tensor:
    """(L,) the advantage of each token: its turn's, or its row's."""
    if batch.token_advantages is not None:
        return batch.token_advantages
    return broadcast_to_tokens(PerRow(batch.advantages), batch)


def where_trained(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(L,) the values at loss tokens, 0 elsewhere; other tokens get no gradient, whatever their value.

    Put it before an `exp`, not after: a gradient of 0 through an overflowing `exp` is NaN.
    """
    return torch.where(batch.trained, values, torch.zeros_like(values))


def row_sum(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B,) the sum over each row's loss tokens of (L,) values; 0 where there are none. Differentiable."""
    zeros = torch.zeros(batch.num_rows, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, batch.row_of_token, where_trained(values, batch))


def row_mean(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B,) the mean over each row's loss tokens of (L,) values; 0 where there are none. Differentiable."""
    return row_sum(values, batch) / batch.loss_tokens.clamp(min=1)


def broadcast_to_tokens(values: PerToken | PerRow, batch: Batch) -> torch.Tensor:
    """(L,) the value that holds for each token: its own, or its row's."""
    if isinstance(values, PerToken):
        return values.values
    # Not values[rows]: on a CPU the gradient of that adds up in the order in which threads come by.
    return values.values.index_select(0, batch.row_of_token)
