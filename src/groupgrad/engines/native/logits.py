"""One forward pass over flat tokens under an attention plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from groupgrad.modeling.scoring.attention import AttentionPlan, run_planned
from groupgrad.modeling.scoring.forward import narrowed_head


def last_logits(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, last: torch.Tensor, **extra: Any
) -> torch.Tensor:
    """(N, V) logits at the places `last` (N,) of the flat tokens `ids` (T,) at `positions` (T,) or (3, T).

    `extra` are further arguments of the model, its images. ValueError if the model cannot run plans.
    """
    with narrowed_head(model, (torch.zeros_like(last), last), torch.Size((1, len(ids)))) as head:
        logits = run_planned(model, ids, positions, plan, **extra).logits[0]
    # Models that compute their logits without the output head return those of all tokens.
    return logits if head.narrowed else logits[last.to(logits.device)]


def step_logits(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """(n, V) logits of one token `ids` (n,) each of n rows, at `positions` (n,)."""
    return run_planned(model, ids, positions, plan).logits[0]


@contextmanager
def weights_cast_once(model: nn.Module) -> Iterator[None]:
    """Mixed precision, which has to be in force already, casts frozen weights once in here and not in each step.

    Of all weights it keeps the casts of those that require gradients; where nothing is differentiated, that is all that
    requiring them changes. They take `cast_bytes`.
    """
    kinds = {kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
    frozen = [
        parameter
        for parameter in model.parameters()
        if parameter.device.type in kinds
        and parameter.dtype == torch.float32
        and not parameter.requires_grad
        and not parameter.is_inference()
    ]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def cast_bytes(model: nn.Module, device: torch.device) -> int:
    """What mixed precision, if it is in force, keeps of weights in half precision on a device; at most."""
    if device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device.type):
        return 0
    matrices = (p for p in model.parameters() if p.dtype == torch.float32 and p.dim() > 1 and p.device == device)
    return sum(2 * matrix.numel() for matrix in matrices)
