"""Lengths and groups of the rows of a decode step, for kernels that read the keys of each row alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class DecodeTables:
    """Rows of a decode step, on the device; see `StepShape` for the sizes."""

    lengths: torch.Tensor
    """(n,) int64 suffix tokens of each row before the step."""
    prompt_lengths: torch.Tensor
    """(n,) int64."""
    groups: torch.Tensor
    """(groups, 1 + rows per group) int64: a group's prompt length, then the numbers of its rows, -1 for none."""
    num_suffix: int
    """Suffix tokens that any row may have, the new one included."""
    num_prompt: int
    """Tokens of the longest prompt."""
