"""The policy as vLLM serves it in a training run: refreshed before a round, and known to be what it should be."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from groupgrad import dist
from groupgrad.engines.base import Request, Sample, SamplingOptions, Session, sample_all
from groupgrad.engines.vllm.http import GIVEN_UP

logger = logging.getLogger(__name__)


class VLLMPolicy:
    """An engine over vLLM whose weights are `model`'s at the last `refresh`.

    `engine` is a `VLLMServerEngine` or a `VLLMColocateEngine`. With `sends_adapter` a LoRA adapter is sent alone,
    otherwise all weights. With `tells_logprobs=False` samples have no log-probs, for those that are of another
    distribution than training's.
    """

    exact = False
    """vLLM computes in its own way, and from a copy."""

    def __init__(self, engine: Any, model: nn.Module, *, sends_adapter: bool = False, tells_logprobs: bool = True):
        self.engine, self._model = engine, model
        self._sends_adapter, self._tells_logprobs = sends_adapter, tells_logprobs
        self._policy_step: int | None = None
        self._is_stopped = False

    @property
    def policy_step(self) -> int | None:
        """The optimizer step whose weights samples come from; None before the first `refresh`."""
        return self._policy_step

    def refresh(self, policy_step: int) -> None:
        """Collective. See to it that samples come from the policy as it is now, at this optimizer step; weights that
        are there already are not sent again. Nothing may be sampled meanwhile."""
        if self._is_stopped:
            self._is_stopped = self.engine.is_stopped = False
        if self._policy_step == policy_step:
            return
        self._policy_step = None
        weight_version = ""
        with dist.errors_on_all_ranks():
            push = self.engine.push_adapter if self._sends_adapter else self.engine.push
            weight_version = push(self._model, policy_step)
        if hasattr(self.engine, "expect"):
            self.engine.expect(dist.all_gather_objects(weight_version)[0])
        self._policy_step = policy_step

    def invalidate(self) -> None:
        """The policy may have changed although its step has not: the next `refresh` sends it whatever that is."""
        self._policy_step = None

    def sleep(self) -> None:
        """Let vLLM give its memory back until the next `refresh`, where it was started so."""
        sleep = getattr(self.engine, "sleep", None)
        if sleep is not None:
            sleep()

    @contextmanager
    def freeze_weights(self) -> Iterator[None]:
        """Inside, the policy may change while rows are sampled: a server that has lost its weights is not given it, and
        what is sampled fails with WeightsLost."""
        self.engine.is_frozen = True
        try:
            yield
        finally:
            self.engine.is_frozen = False

    def stop(self) -> None:
        """Have what is sampled now, in another thread, fail soon."""
        self._is_stopped = self.engine.is_stopped = True

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        with self.session(options) as session:
            return sample_all(session, requests)

    @contextmanager
    def session(self, options: SamplingOptions) -> Iterator[Session]:
        """A session over vLLM."""
        with self.engine.session(options) as session:
            yield _ServedSession(session, self)

    def close(self) -> None:
        """End what this process started of vLLM."""
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()


@dataclass(slots=True)
class _ServedSession:
    inner: Session
    policy: VLLMPolicy

    def submit(self, request: Request) -> int:
        """The ticket of a request that is sampled from now on."""
        return self.inner.submit(request)

    def advance(self) -> list[tuple[int, Sample]]:
        """Sample a little; those that ended by it. RuntimeError if the policy was told to stop."""
        if self.policy._is_stopped:
            raise RuntimeError(GIVEN_UP)
        ended = self.inner.advance()
        if self.policy._tells_logprobs:
            return ended
        return [(ticket, replace(sample, logprobs=None)) for ticket, sample in ended]

    @property
    def num_open(self) -> int:
        """Requests submitted that have not ended."""
        return self.inner.num_open

    def release(self, ticket: int) -> None:
        """Forget what was kept of an ended request."""
        self.inner.release(ticket)
