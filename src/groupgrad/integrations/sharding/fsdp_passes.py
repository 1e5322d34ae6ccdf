"""Counts the collectives of FSDP 2 in a pass: its gathers of units and its reductions of their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from groupgrad.integrations.sharding.pass_collectives import PassCollectives

# torch 2.13 has other names for them.
_all_gather: Any = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor

_ATTRIBUTE = "_groupgrad_pass_collectives"


class FSDPPassCollectives(PassCollectives):
    """The collectives of the passes of a model that FSDP 2 shards."""

    def __init__(self, model: Any):
        super().__init__()
        self._model = model

    def begin_rest(self) -> None:
        """As `PassCollectives.begin_rest`; resets the units' state of the failed pass. Not a collective."""
        self._model.reset_iter_state()
        super().begin_rest()


class _Counted:
    """A kind of collective that `PassCollectives` counts; a skipped one fills its output with zeros."""

    def __init__(self, collectives: PassCollectives, run: Any):
        self._collectives, self._run = collectives, run

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor for the collective's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *further: Any, **options: Any
    ) -> Any:
        """Runs the collective. Collective unless it is left out."""
        if self._collectives.is_due():
            return self._run(output_tensor, input_tensor, group, *further, **options)
        output_tensor.zero_()
        return None


def count_collectives(model: Any, units: list[Any]) -> None:
    """Counts the collectives of all the model's FSDP units from now on.

    Does nothing where torch cannot recover from a failed pass (before 2.13).
    """
    if not all(hasattr(model, name) for name in ("reset_iter_state", "set_custom_all_gather")):
        return
    collectives = FSDPPassCollectives(model)
    gather = _Counted(collectives, _gather)
    reduce = _Counted(collectives, _reduce)
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    setattr(model, _ATTRIBUTE, collectives)


def pass_collectives(model: nn.Module) -> PassCollectives | None:
    """The counted collectives of a model; None if they are not counted."""
    return getattr(model, _ATTRIBUTE, None)


def _gather(output: torch.Tensor, own: torch.Tensor, group: Any, async_op: bool = False) -> Any:
    return _all_gather(output, own, group=group, async_op=async_op)


def _reduce(output: torch.Tensor, own: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
    return _reduce_scatter(output, own, op=op, group=group, async_op=async_op)
