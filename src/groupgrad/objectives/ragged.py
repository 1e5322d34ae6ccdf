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


@dataclass(slots=True, frozen=True)
class Layout:
    """Which row every token belongs to and which tokens the loss is over."""

    row_of_token: torch.Tensor
    """(L,) int64."""
    trained: torch.Tensor
    """(L,) bool, the loss mask m."""
    num_rows: int
    """B."""
    counts: torch.Tensor
    """(B,) int64, loss tokens of each row; 0 for rows that are empty or masked out."""


def layout_of(batch: Batch) -> Layout:
    """The layout of a batch."""
    counts = torch.zeros(batch.num_rows, dtype=torch.int64, device=batch.trained.device)
    counts = counts.index_add(0, batch.row_of_token, batch.trained.long())
    return Layout(batch.row_of_token, batch.trained, batch.num_rows, counts)


def where_trained(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(L,) the values at loss tokens, 0 elsewhere; other tokens get no gradient, whatever their value.

    Put it before an `exp`, not after: a gradient of 0 through an overflowing `exp` is NaN.
    """
    return torch.where(layout.trained, values, torch.zeros_like(values))


def row_sum(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(B,) the sum over each row's loss tokens of (L,) values; 0 where there are none. Differentiable."""
    zeros = torch.zeros(layout.num_rows, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, layout.row_of_token, where_trained(values, layout))


def row_mean(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(B,) the mean over each row's loss tokens of (L,) values; 0 where there are none. Differentiable."""
    return row_sum(values, layout) / layout.counts.clamp(min=1)


def spread(values: PerToken | PerRow, layout: Layout) -> torch.Tensor:
    """(L,) the value that holds for each token: its own, or its row's."""
    if isinstance(values, PerToken):
        return values.values
    # Not values[rows]: on a CPU the gradient of that adds up in the order in which threads come by.
    return values.values.index_select(0, layout.row_of_token)
