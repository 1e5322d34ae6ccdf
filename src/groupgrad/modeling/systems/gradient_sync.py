"""What ranks that each hold the whole model tell each other of a step: their gradients, or that one of them failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from groupgrad import dist
from groupgrad.modeling.systems.oom import release_frames


class GradientSync:
    """Joins the ranks of plain data parallelism, once at the beginning and once a step.

    DistributedDataParallel would reduce gradients within the step's last backward pass, so that all ranks had to make
    the same passes. Here a rank makes as many as its memory and its rows need, and the gradients are averaged when they
    are complete. That hides no communication behind a backward pass, which in a step that also samples its rows is
    little, and saves the second copy of all gradients that the wrapper keeps.

    `buffers`: what the model computes with besides parameters is rank 0's too.
    """

    def __init__(self, model: nn.Module, *, bucket_bytes: int = dist.BUCKET_BYTES, buffers: bool = True):
        self._model, self._bucket_bytes, self._buffers = model, bucket_bytes, buffers

    def begin(self) -> None:
        """Collective. Every rank has rank 0's model."""
        dist.broadcast_module(self._model, buffers=self._buffers)

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Collective at the end of the step's last micro-batch, which leaves the mean of the ranks' gradients, and
        when something is raised inside, which is raised on all ranks. Inside there is no collective."""
        try:
            yield
        except Exception as error:
            if dist.is_active():
                release_frames(error)  # the others are told by way of the device, which may be full
            dist.raise_on_all_ranks(error)
        if not is_last:
            return
        dist.raise_on_all_ranks(None)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        dist.average_gradients(trained, bucket_bytes=self._bucket_bytes)
        if self._buffers:
            for statistics in _running_statistics(self._model):
                dist.broadcast_tensor(statistics)


def _running_statistics(model: nn.Module) -> Iterator[torch.Tensor]:
    """What batch normalisation remembers of the rows that it has seen, which differ from rank to rank."""
    for module in model.modules():
        if isinstance(module, _NormBase):
            yield from module.buffers(recurse=False)
