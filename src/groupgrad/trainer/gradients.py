"""The gradients of an optimizer step: summed in float32, averaged over ranks once a step, the same in every run.

PyTorch adds the gradient of each pass to `.grad`, which has the weights' type. bfloat16 has 8 significant bits, so a
sum of many passes loses most of what each of them adds. `GradientSums` adds each pass's gradient to a float32 sum,
which `GradientSync` averages over ranks, and which is rounded once, when the step is complete. `OverlappedAverage`
sends parts of it while the last backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import deterministic

from groupgrad import dist
from groupgrad.memory.oom import release_frames
from groupgrad.models.shards import is_shard, local_part


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


class GradientSync:
    """Averages gradients over ranks that each hold the whole model.

    DistributedDataParallel reduces gradients inside the step's last backward pass, so all ranks must make the same
    passes. Here each rank makes as many passes as its memory and rows need, and the complete gradients are averaged in
    place, without the wrapper's second copy of all gradients. With `overlaps` gradients are sent during a rank's last
    backward pass, as it completes them. This begins with the second step, since the first one shows which parameters
    have gradients. A backward pass must then add to each gradient only once.

    `sums` holds the gradients, in the type in which they are sent; by default each parameter's `.grad` does. With
    `buffers` training begins with rank 0's buffers on all ranks. With `joint_passes` ranks make passes together. When
    one of them fails, the others wait for it inside a pass and cannot agree on an error, so the error ends its own
    rank, and the watch over the run (`hangs.py`) ends the others.
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


class OverlappedAverage:
    """Averages gradients over ranks in buckets, each sent as soon as this rank's gradients in it are complete.

    Gradients are sent in place, in the order in which backward passes complete them. Ranks may make different passes:
    `send_rest` sends the buckets that a rank's last pass has not sent. A pass that runs out of memory may be repeated:
    the buckets it has sent were complete, and `take` overwrites what the repetition computes for them. The last bucket
    waits for `send_rest`, so that the caller can still change a gradient (`unsent`).

    `parameters` are pairs of a parameter and of its holder, whose `.grad` is its gradient (`GradientSums`); they are
    the same on all ranks.
    """

    def __init__(self, parameters: Iterable[tuple[nn.Parameter, nn.Parameter]], bucket_bytes: int):
        self._pairs = list(parameters)[::-1]
        self._buckets = [list(bucket) for bucket in dist.buckets([h for _, h in self._pairs], bucket_bytes)]
        self._sent: list[tuple[list[torch.Tensor], dist.BucketReduce]] = []
        self._had_gradient: list[bool] = []
        self._complete: set[int] = set()
        self._made_up: nn.Parameter | None = None

    @property
    def holders(self) -> set[int]:
        """Ids of the holders."""
        return {id(holder) for _, holder in self._pairs}

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        """Wraps this rank's last backward pass of the step: its gradients are sent as they become complete."""
        self._complete = set()
        handles = [p.register_post_accumulate_grad_hook(partial(self._completed, holder)) for p, holder in self._pairs]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def unsent(self) -> list[nn.Parameter]:
        """Holders whose gradients are not sent yet; if none has a gradient, the first one gets a gradient of zeros."""
        found = [holder for bucket in self._buckets[len(self._sent) :] for holder in bucket]
        if found and all(holder.grad is None for holder in found):
            found[0].grad, self._made_up = torch.zeros_like(found[0]), found[0]
        return found

    def send_rest(self) -> None:
        """Sends the remaining buckets; missing gradients of this rank count as 0. All ranks call it."""
        while len(self._sent) < len(self._buckets):
            self._send()

    def take(self) -> None:
        """Stores the mean gradients in the holders, None where no rank has one. Collective, after `send_rest`."""
        had_gradient = dist.all_gather_objects(bytes(self._had_gradient))
        means: list[torch.Tensor] = []
        for tensors, reduce in self._sent:
            reduce.wait()
            means += tensors
        holders = [holder for bucket in self._buckets for holder in bucket]
        for holder, mean, *flags in zip(holders, means, *had_gradient):
            holder.grad = mean if any(flags) else None

    def _completed(self, holder: nn.Parameter, _parameter: torch.Tensor) -> None:
        if id(holder) in self._complete:
            raise RuntimeError(
                "a backward pass has added to a gradient in several parts, which are sent when they are complete; set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        self._complete.add(id(holder))
        while len(self._sent) < len(self._buckets) - 1:
            if not all(id(other) in self._complete for other in self._buckets[len(self._sent)]):
                return
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        self._had_gradient += [holder.grad is not None and holder is not self._made_up for holder in bucket]
        tensors = [torch.zeros_like(holder) if holder.grad is None else holder.grad for holder in bucket]
        self._sent.append((tensors, dist.BucketReduce(tensors)))


@contextmanager
def deterministic_cpu(model: nn.Module) -> Iterator[None]:
    """Inside, PyTorch uses deterministic algorithms, if all of `model` is on CPUs and the user has not set them.

    By default PyTorch's threads add values with the same index in the order in which they arrive. This package's code
    avoids such sums; the code of some models has them (mixtures of experts). An operation without a deterministic
    algorithm warns and runs as usual. The setting is global and restored afterwards.
    """
    is_enabled = torch.are_deterministic_algorithms_enabled()
    if is_enabled or any(p.device.type != "cpu" for p in model.parameters()):
        yield
        return
    # By default this mode also fills the memory of new tensors, which costs time and is not needed here.
    settings: Any = deterministic
    fills_memory, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False, warn_only=warn_only)
        settings.fill_uninitialized_memory = fills_memory
