"""Gradient averaging and error propagation for plain data parallelism, once an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from groupgrad import dist
from groupgrad.modeling.systems.gradient_sums import GradientSums
from groupgrad.modeling.systems.oom import release_frames


class GradientSync:
    """Averages gradients over ranks that each hold the whole model.

    DistributedDataParallel reduces gradients inside the step's last backward pass, so all ranks must make the same
    passes. Here each rank makes as many passes as its memory and rows need, and the complete gradients are averaged.
    This overlaps no communication with a backward pass, which matters little in a step that also samples, and saves the
    wrapper's second copy of all gradients.

    `sums` has the gradients, in the type that they are sent in; without it they are the parameters' own. With `buffers`
    the model's buffers are copied from rank 0 too. With `joint_passes` ranks make passes together: when one of them
    fails, the others wait for it inside a pass and can agree on nothing, so its error ends it alone, and the loss of a
    process ends the others.
    """

    def __init__(
        self,
        model: nn.Module,
        sums: GradientSums | None = None,
        *,
        bucket_bytes: int = dist.BUCKET_BYTES,
        buffers: bool = True,
        joint_passes: bool = False,
    ):
        self._model, self._bucket_bytes, self._buffers = model, bucket_bytes, buffers
        self._sums = GradientSums(model, in_float32=False) if sums is None else sums
        self._joint_passes = joint_passes

    def begin(self) -> None:
        """Copies rank 0's model to all ranks. Collective."""
        dist.broadcast_module(self._model, buffers=self._buffers)

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Averages gradients over ranks after the last micro-batch. An exception on one rank is raised on all.

        Collective on exit from the last micro-batch and on errors; the body must not run one, except for joint passes.
        """
        try:
            yield
        except Exception as error:
            if self._joint_passes:
                raise
            if dist.is_active():
                release_frames(error)  # the error is sent over the device, which may be full
            dist.raise_on_all_ranks(error)
        if not is_last:
            return
        dist.raise_on_all_ranks(None)
        dist.average_gradients(self._sums.holders, bucket_bytes=self._bucket_bytes)
        if self._buffers:
            for statistics in _running_statistics(self._model):
                dist.broadcast_tensor(statistics)


def _running_statistics(model: nn.Module) -> Iterator[torch.Tensor]:
    """Running statistics of batch normalisation, which differ between ranks."""
    for module in model.modules():
        if isinstance(module, _NormBase):
            yield from module.buffers(recurse=False)
