"""Forward passes over flat tokens under an attention layout, and the mixed precision they run in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from groupgrad.models.unwrapping import output_head
from groupgrad.scoring.attention import run_flat, without_cudnn_attention
from groupgrad.scoring.attention_layout import AttentionLayout
from groupgrad.scoring.head_hook import HeadHook


def last_logits(
    model: nn.Module,
    ids: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionLayout,
    last: torch.Tensor,
    **extra: Any,
) -> torch.Tensor:
    """(N, V) logits at the indices `last` (N,) of the flat tokens `ids` (T,) at `positions` (T,) or (3, T).

    `extra` are further arguments of the model, such as images. ValueError if the model cannot run under layouts.
    """
    head = HeadHook(last, torch.zeros_like(last), last, torch.Size((1, len(ids))))
    with head.on(output_head(model)), without_cudnn_attention():
        logits = run_flat(model, ids, positions, attention, **extra).logits[0]
    # Models that compute their logits without the output head return those of all tokens.
    return logits if head.is_narrowed else logits[last.to(logits.device)]


def step_logits(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionLayout
) -> torch.Tensor:
    """(n, V) logits of one token per row, `ids` (n,) at `positions` (n,)."""
    return run_flat(model, ids, positions, attention).logits[0]


@contextmanager
def weights_cast_once(model: nn.Module) -> Iterator[None]:
    """Makes autocast, which must be active already, cast frozen weights once instead of in each step.

    Autocast caches only the casts of weights that require gradients, so frozen weights require gradients inside the
    context. Nothing else changes, since no gradients are computed there. The casts take `cast_bytes`.
    """
    device_types = {name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)}
    frozen = [
        parameter
        for parameter in (model.parameters() if device_types else ())
        if parameter.device.type in device_types
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
    """Upper bound on the bytes of weights that autocast, if active, caches in half precision on a device."""
    if device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device.type):
        return 0
    matrices = (p for p in model.parameters() if p.dtype == torch.float32 and p.dim() > 1 and p.device == device)
    return sum(2 * matrix.numel() for matrix in matrices)
