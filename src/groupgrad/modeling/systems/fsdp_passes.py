"""Counts the collectives of FSDP in a pass, so that a rank whose pass has failed can make the rest of them.

In a pass all ranks gather the units of the model and reduce their gradients in the same order. A rank whose memory runs
out has made some of these collectives; the others wait for the rest. It therefore starts a pass over a placeholder
token, in which the collectives that it has made already do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

# torch 2.13 has other names for them.
_all_gather: Any = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor

_ATTRIBUTE = "_groupgrad_pass_collectives"


class PassCollectives:
    """The collectives of the passes of a sharded model."""

    def __init__(self, model: Any):
        self._model = model
        self._num_made = self._num_left_out = 0

    def begin_pass(self) -> None:
        """A pass begins."""
        self._num_made = self._num_left_out = 0

    def begin_rest(self) -> None:
        """After a failed pass: the next one makes the collectives that the failed pass has left. Not a collective."""
        self._model.reset_iter_state()
        self._num_made, self._num_left_out = 0, self._num_made

    def is_due(self) -> bool:
        """Counts a collective; False if the failed pass has made it already."""
        self._num_made += 1
        return self._num_made > self._num_left_out


class _Counted:
    """A kind of collective that `PassCollectives` counts; one that is left out fills its output with zeros."""

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
    """Has the collectives of these FSDP units, which are all of the model's, counted from now on.

    Nothing happens where torch cannot recover from a failed pass (before 2.13).
    """
    if not all(hasattr(model, name) for name in ("reset_iter_state", "set_custom_all_gather")):
        return
    collectives = PassCollectives(model)
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
