"""Says whether Triton's kernels compute decode steps on a GPU, and what they read of the rows.

`GROUPGRAD_TRITON=0` turns them off.
`engines/selection.py` compares what an engine samples by them with a plain forward pass, and leaves them if it differs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from groupgrad.kernels.fallbacks import fall_back

logger = logging.getLogger(__name__)

SWITCH = "GROUPGRAD_TRITON"
"""Environment variable; 0 turns the kernels off."""


@dataclass(slots=True, frozen=True)
class DecodeTables:
    """Lengths and groups of the rows of a decode step, on the device; see `StepShape` for the sizes."""

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


def has_attention_kernels(query: torch.Tensor) -> bool:
    """True if Triton's kernels can compute the attention of such queries."""
    if not _is_on_gpu(query) or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    if not _has_triton():
        fall_back(logger, "attention of decode steps runs by matrix products, which is slower", obstacle_to_kernels())
    return _has_triton()


def has_layer_kernels(parameters: Sequence[torch.Tensor]) -> bool:
    """True if Triton's kernels can compute the layers of a model with these parameters: they are on one GPU."""
    return len({p.device for p in parameters}) == 1 and _is_on_gpu(parameters[0].data) and _has_triton()


def obstacle_to_kernels() -> str:
    """The reason why a model on a GPU has no Triton kernels here; empty if nothing speaks against them."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 turns Triton's kernels off"
    return "" if _has_triton() else "Triton is not installed"


def _is_on_gpu(query: torch.Tensor) -> bool:
    return query.is_cuda and type(query) is torch.Tensor and os.environ.get(SWITCH) != "0"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
