"""One forward pass over flat tokens under an attention plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from groupgrad.models.attention import AttentionPlan, run_planned
from groupgrad.models.forward import output_head


def planned_logits(
    model: nn.Module,
    ids: torch.Tensor,
    positions: torch.Tensor,
    plan: AttentionPlan,
    *,
    last: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, V) logits of the flat tokens `ids` (T,) at `positions` (T,), or only of those at the places `last`."""
    with _head_on(model, last, ids.shape[0]) as seen:
        logits = run_planned(model, ids, positions, plan).logits[0]
    # The head's input was narrowed unless this model computes its logits in another way.
    return logits if last is None or seen["narrowed"] else logits[last.to(logits.device)]


@contextmanager
def _head_on(model: nn.Module, places: torch.Tensor | None, num_tokens: int) -> Iterator[dict[str, bool]]:
    seen = {"narrowed": False}
    head = output_head(model)
    if places is None or head is None:
        yield seen
        return

    def narrow(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = inputs[0]
        if hidden.dim() != 3 or hidden.shape[:2] != (1, num_tokens):
            return None
        seen["narrowed"] = True
        return (hidden[:, places.to(hidden.device)], *inputs[1:])

    handle = head.register_forward_pre_hook(narrow)
    try:
        yield seen
    finally:
        handle.remove()
