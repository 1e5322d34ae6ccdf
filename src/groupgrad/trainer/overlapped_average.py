"""Averages gradients over ranks while the last backward pass of an optimizer step still runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from groupgrad import dist


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
