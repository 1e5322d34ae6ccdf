"""Trains micro-batches of a model that ranks share; after one runs out of memory, all ranks train the step again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from groupgrad import dist
from groupgrad.batching.micro_batches import MicroBatch
from groupgrad.integrations.sharding.pass_collectives import PassCollectives
from groupgrad.memory.oom import collect_what_failed, is_out_of_memory, release_frames
from groupgrad.memory.oom_retry import Backward, Forward, MemoryGuard
from groupgrad.objectives import NO_PASS, PolicyLoss


class JointMemoryGuard(MemoryGuard):
    """A `MemoryGuard` for a model whose passes are collectives, so that all ranks make equally many.

    A rank that needs fewer parts than another makes passes without rows. When a pass fails on one rank, it makes the
    rest of the pass's collectives over a placeholder token, and all ranks learn of it. The gradients, which are reduced
    within the pass, are then lost: all drop them, the failed ranks cut the part, and all parts of the step are trained
    again.
    """

    def __init__(self, clear: Callable[[], None], collectives: PassCollectives, **options: Any):
        super().__init__(clear, **options)
        self._collectives = collectives

    def train(self, micro_batch: MicroBatch, forward: Forward, backward: Backward) -> list[PolicyLoss]:
        """As `MemoryGuard.train`. Collective."""
        parts = self._within_limit(micro_batch)
        idle = [part for part in parts if part.passes == NO_PASS]
        losses = [loss for part in idle for loss in super(JointMemoryGuard, self).train(part, forward, backward)]
        live = [part for part in parts if part.passes != NO_PASS]
        count = max(dist.all_gather_objects(len(live)))
        waiting = [(part, True) for part in self._filled(live, count, micro_batch)]
        while waiting:
            part, is_first_time = waiting.pop(0)
            loss, has_failed = self._try_jointly(part, forward, backward)
            if loss is None:
                self._clear()
                smaller = self._filled(self._smaller(part) if has_failed else [part], 2, micro_batch)
                waiting[:0] = [*((done, False) for done in self._done), *((half, is_first_time) for half in smaller)]
                self._done = []
                continue
            self._done.append(part)
            if is_first_time and part.rows:
                losses.append(loss)
        return losses

    def _filled(self, parts: list[MicroBatch], count: int, micro_batch: MicroBatch) -> list[MicroBatch]:
        """Appends parts without rows until there are `count`."""
        return parts + [micro_batch.without_rows()] * (count - len(parts))

    def _try_jointly(self, part: MicroBatch, forward: Forward, backward: Backward) -> tuple[PolicyLoss | None, bool]:
        """The detached loss, or None if memory ran out on any rank; True if it did on this one. Collective.

        RuntimeError on all ranks if a part that does not fit cannot be cut.
        """
        passes = self._passes_of(part)
        self._collectives.begin_pass()
        loss, failure = None, None
        try:
            with passes:
                loss = _pass(part, forward, backward)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            release_frames(error)
            failure = error
        if failure is not None:
            collect_what_failed()
            self._collectives.begin_rest()
            _pass(part.without_rows(), forward, backward)
        problem = None if failure is None else self._hopeless(part)
        failed, hopeless = zip(*dist.all_gather_objects((failure is not None, problem is not None)))
        if any(hopeless):
            error = None if problem is None else RuntimeError(problem)
            if error is not None:
                error.__cause__ = failure
            dist.raise_on_all_ranks(error)
        return None if any(failed) else loss, failure is not None


def _pass(part: MicroBatch, forward: Forward, backward: Backward) -> PolicyLoss:
    result = forward(part)
    backward(result.loss, False)  # gradients are reduced within each pass, so no pass is the last one
    return replace(result, loss=result.loss.detach())
