"""Sums the gradients of half-precision weights in float32 over the backward passes of an optimizer step.

PyTorch adds the gradient of each pass to `.grad`, which has the weights' type. bfloat16 has 8 significant bits, so a
sum of many passes loses most of what each of them adds. Here each pass's gradient goes into a float32 sum, which is
averaged over ranks and rounded once, when the step is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from groupgrad.integrations.sharding.fsdp import is_shard, local_part


class GradientSums:
    """The gradients of an optimizer step: float32 sums for half-precision weights, `.grad` itself for others.

    A float32 sum takes 4 bytes a weight, a gradient in half precision 2. Without `in_float32` every weight's `.grad`
    is the sum, in the weight's type.
    """

    def __init__(self, model: nn.Module, *, in_float32: bool):
        self._model = model
        self._summed = (torch.bfloat16, torch.float16) if in_float32 else ()
        self._stand_ins: dict[nn.Parameter, nn.Parameter] = {}

    @property
    def holders(self) -> list[nn.Parameter]:
        """For each trained parameter, the parameter whose `.grad` holds its sum during a step: itself or a stand-in.

        A stand-in is a float32 parameter without memory. The stand-in of a shard has the shape of this rank's part.
        """
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return [self._stand_in(parameter) if parameter.dtype in self._summed else parameter for parameter in trained]

    @contextmanager
    def passes(self, *, is_last: bool) -> Iterator[None]:
        """Makes backward passes add to the sums; after the step's last passes, rounds the sums into `.grad`."""
        parameters = self._model.parameters() if self._summed else ()
        summed = [p for p in parameters if p.requires_grad and p.dtype in self._summed]
        handles = [parameter.register_post_accumulate_grad_hook(self._add) for parameter in summed]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if is_last:
            for parameter in summed:
                self._round(parameter)

    def clear(self) -> None:
        """Drops what has been summed."""
        for stand_in in self._stand_ins.values():
            stand_in.grad = None
        self._model.zero_grad()

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._stand_ins:
            values = torch.zeros((), device=parameter.device).expand(local_part(parameter).shape)
            self._stand_ins[parameter] = nn.Parameter(values, requires_grad=False)
        return self._stand_ins[parameter]

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter) -> None:
        """Moves a pass's gradient into the sum."""
        stand_in, gradient = self._stand_in(parameter), local_part(parameter.grad)
        parameter.grad = None
        if stand_in.grad is None:
            stand_in.grad = gradient.float()
        else:
            stand_in.grad += gradient

    @torch.no_grad()
    def _round(self, parameter: nn.Parameter) -> None:
        stand_in = self._stand_in(parameter)
        if stand_in.grad is None:
            return
        gradient = stand_in.grad.to(parameter.dtype)
        stand_in.grad = None  # before the next one is rounded, so that all of both are never in memory
        if is_shard(parameter):
            parameter.grad = torch.empty_like(parameter)
            local_part(parameter.grad).copy_(gradient)
        else:
            parameter.grad = gradient
