"""Gradient averaging and error propagation for plain data parallelism, once an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from groupgrad import dist
from groupgrad.memory.oom import release_frames
from groupgrad.trainer.gradient_sums import GradientSums
from groupgrad.trainer.overlapped_average import OverlappedAverage


class GradientSync:
    """Averages gradients over ranks that each hold the whole model.

    DistributedDataParallel reduces gradients inside the step's last backward pass, so all ranks must make the same
    passes. Here each rank makes as many passes as its memory and rows need, and the complete gradients are averaged in
    place, without the wrapper's second copy of all gradients. With `overlaps` gradients are sent during a rank's last
    backward pass, as it completes them. This begins with the second step, since the first one shows which parameters
    have gradients. A backward pass must then add to each gradient only once.

    `sums` holds the gradients, in the type in which they are sent; by default each parameter's `.grad` does. With
    `buffers` the model's buffers are copied from rank 0 too. With `joint_passes` ranks make passes together. When one
    of them fails, the others wait for it inside a pass and cannot agree on an error, so the error ends its own rank,
    and the lost process ends the others.
    """

    def __init__(
        self,
        model: nn.Module,
        sums: GradientSums | None = None,
        *,
        bucket_bytes: int = dist.BUCKET_BYTES,
        buffers: bool = True,
        joint_passes: bool = False,
        overlaps: bool = False,
    ):
        self._model, self._bucket_bytes, self._buffers = model, bucket_bytes, buffers
        self._sums = GradientSums(model, in_float32=False) if sums is None else sums
        self._joint_passes, self._overlaps = joint_passes, overlaps and not joint_passes
        self._ahead = OverlappedAverage((), bucket_bytes)
        self._is_last = False

    def begin(self) -> None:
        """Copies rank 0's model to all ranks. Collective."""
        dist.broadcast_module(self._model, buffers=self._buffers)

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Averages gradients over ranks after the last micro-batch. An exception on one rank is raised on all.

        Collective on exit from the last micro-batch and on errors; the body must not run one, except for joint passes.
        """
        self._is_last = is_last
        try:
            yield
        except Exception as error:
            if self._joint_passes:
                raise
            if dist.is_active():
                release_frames(error)  # the error is sent over the device, which may be full
            self._ahead.send_rest()  # the others send theirs before they learn of the error
            dist.raise_on_all_ranks(error)
        if not is_last:
            return
        self._ahead.send_rest()
        dist.raise_on_all_ranks(None)
        self._average()
        if self._buffers:
            for statistics in _running_statistics(self._model):
                dist.broadcast_tensor(statistics)

    def backward_pass(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The context of a backward pass; `is_last` for this rank's last one in its micro-batch. Not a collective."""
        return self._ahead.last_pass() if is_last and self._is_last else nullcontext()

    def unsent(self) -> list[nn.Parameter]:
        """The holders of gradients that have not been sent to the other ranks."""
        return (self._is_last and self._ahead.unsent()) or self._sums.holders

    def _average(self) -> None:
        """Collective, after all of `_ahead` is sent."""
        holders = self._sums.holders
        self._ahead.take()
        ahead = self._ahead.holders
        rest = [holder for holder in holders if id(holder) not in ahead]
        dist.average_gradients(rest, bucket_bytes=self._bucket_bytes)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        pairs = [pair for pair in zip(trained, holders) if self._overlaps and pair[1].grad is not None]
        self._ahead = OverlappedAverage(pairs, self._bucket_bytes)


def _running_statistics(model: nn.Module) -> Iterator[torch.Tensor]:
    """Running statistics of batch normalisation, which differ between ranks."""
    for module in model.modules():
        if isinstance(module, _NormBase):
            yield from module.buffers(recurse=False)
