"""Samples from the policy with vLLM, whose weights are refreshed before each generation batch.

`VLLMEngine` is the base class of the engine in the training process (`colocate`) and of that over servers
(`server_pool`): its weights are those of the last push. `VLLMPolicy` decides when the policy is pushed.
"""

# The way of a push:
#
#   RolloutPrefetcher                     before each generation batch
#   VLLMPolicy.refresh                    unless vLLM has the weights of this step
#   VLLMColocateEngine._push              `push_in_process`: by reference, in the training process
#   VLLMServerPool._push                  otherwise, to each server that answers:
#   ServerClient.push_weights             look, meet, start, an update for each bucket, finish
#   Routes.route_start, _update, _finish  pause the server's rows, hand each call to vLLM's workers, go on
#   WeightReceiver                        in each worker: loads the buckets, compares checksum and names

from __future__ import annotations

import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from groupgrad import dist, stopping
from groupgrad.engines.base import Request, Sample, SamplingOptions, Session, sample_all
from groupgrad.integrations.vllm.http import GIVEN_UP
from groupgrad.integrations.vllm.vllm_params import PROCESSED, is_plain, sampling_fields
from groupgrad.metrics import Metric

POLL_S = 0.01
"""Seconds between two looks of a sampling thread whether a push has ended."""


@dataclass(slots=True)
class Push:
    """A push, kept so that it can be repeated for a restarted or woken vLLM."""

    model: nn.Module
    kind: Literal["weights", "adapter"]
    policy_step: int
    keeps_rows: bool = False
    """Rows under way go on with these weights; otherwise the push waits for them."""
    weight_version: str = field(init=False)
    """The policy step and a suffix that no other push has."""

    def __post_init__(self) -> None:
        self.weight_version = f"{self.policy_step}-{uuid.uuid4().hex[:8]}"


def policy_step_of(weight_version: str) -> int:
    """The optimizer step of the weights of a push."""
    return int(weight_version.partition("-")[0])


class VLLMEngine(ABC):
    """An engine whose weights are those of the last push. Subclasses push and sample.

    `regex` is an expression that every completion must match.
    """

    max_model_len: int
    """Limit on the tokens of a prompt and its completion together."""
    logprobs_mode: str = PROCESSED
    """vLLM's setting of this name, see `vllm_params`."""

    def __init__(self, regex: str | None = None):
        self.regex = regex
        self._weight_version: str | None = None
        self._pushed: list[str] = []
        self._last_push: Push | None = None
        self.is_frozen = False
        """True while the policy may change during sampling, so that it must not be pushed."""
        self.is_stopped = False
        """True once training ends: waiting for vLLM fails."""

    @property
    def weight_version(self) -> str:
        """Token of the push that samples come from. ValueError before the first push and after one that failed."""
        if self._weight_version is None:
            raise ValueError(
                "vLLM has no whole weights: no weights were pushed yet, or the last push failed; call push before "
                "sampling"
            )
        return self._weight_version

    @property
    def pushed(self) -> Sequence[str]:
        """The weight versions up to `weight_version`, in order; it grows with each push. ValueError as there."""
        return self._pushed if self.weight_version else ()

    def plain_logprobs(self, options: SamplingOptions) -> bool:
        """True if log-probs of samples are those of the temperature softmax, as training scores tokens.

        Otherwise they are renormalised over the tokens that cuts, penalties or a regex left.
        """
        return is_plain(sampling_fields(options, regex=self.regex), self.logprobs_mode)

    def push(self, model: nn.Module, policy_step: int, *, keeps_rows: bool = False) -> str:
        """Sends all weights, adapters merged; returns their weight version. Collective if they are sharded.

        With `keeps_rows`, which only servers can, rows under way go on with them.
        """
        return self._push(Push(model, "weights", policy_step, keeps_rows))

    def push_adapter(self, model: nn.Module, policy_step: int) -> str:
        """Sends the active LoRA adapter alone; returns its weight version.

        The weights below it are sent once.
        """
        return self._push(Push(model, "adapter", policy_step))

    @abstractmethod
    def _push(self, push: Push) -> str:
        """Sends a push; returns its weight version."""

    def expect(self, weight_version: str) -> None:
        """Samples from this weight version from now on; this rank or another one pushes it."""
        self._weight_version = weight_version
        if weight_version not in self._pushed[-1:]:
            self._pushed.append(weight_version)

    def share_weight_version(self) -> None:  # noqa: B027
        """Collective after a push on all ranks; does nothing where each rank has an engine with its own weights."""

    @abstractmethod
    def session(self, options: SamplingOptions) -> AbstractContextManager[Session]:
        """A session over the engine; requests that have not ended when it is closed are aborted."""

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        with self.session(options) as session:
            return sample_all(session, requests)

    def sleep(self) -> None:  # noqa: B027
        """Frees vLLM's memory until the next push or sample, where it was started for that."""

    def close(self) -> None:  # noqa: B027
        """Ends what this process started of vLLM."""


class VLLMPolicy:
    """An engine over vLLM whose weights are `model`'s at the last `refresh`.

    With `sends_adapter` a LoRA adapter is sent alone, otherwise all weights. With `keeps_logprobs=False` samples carry
    no log-probs: for sampling options under which vLLM's are of another distribution than training's.
    """

    is_exact = False
    """vLLM computes with kernels of its own, from a copy of the weights."""
    takes_temperatures = False
    path = ""

    def __init__(
        self, engine: VLLMEngine, model: nn.Module, *, sends_adapter: bool = False, keeps_logprobs: bool = True
    ):
        self.engine, self._model = engine, model
        self._lock = threading.Lock()
        """Held by a push, and by what another thread does with rows that the push keeps."""
        self._is_pushing = False
        self._sends_adapter, self._keeps_logprobs = sends_adapter, keeps_logprobs
        self.policy_step: int | None = None
        """Optimizer step of the weights that samples come from; None before the first `refresh`."""

    @property
    def max_model_len(self) -> int:
        """Limit on the tokens of a prompt and its completion together."""
        return self.engine.max_model_len

    def refresh(self, policy_step: int, *, keeps_rows: bool = False) -> None:
        """Collective. Pushes the policy's weights of this optimizer step, unless vLLM has them already.

        Nothing may be sampled meanwhile, unless `keeps_rows`: then rows that other threads sample go on with the new
        weights.
        """
        self.engine.is_stopped = False
        if self.policy_step == policy_step:
            return
        self.policy_step = None
        with self._push_under_way():
            if keeps_rows:  # a rank reads no row of the new weights before it knows their version
                dist.all_gather_objects(None)
            # A push that a signal cuts in half would leave the server waiting.
            with stopping.finishing(), dist.errors_on_all_ranks():
                if self._sends_adapter:
                    self.engine.push_adapter(self._model, policy_step)
                else:
                    self.engine.push(self._model, policy_step, keeps_rows=keeps_rows)
            self.engine.share_weight_version()
        self.policy_step = policy_step

    @contextmanager
    def _push_under_way(self) -> Iterator[None]:
        self._is_pushing = True
        try:
            with self._lock:
                yield
        finally:
            self._is_pushing = False

    def invalidate(self) -> None:
        """Makes the next `refresh` push the weights even if the step is the same: the policy may have changed."""
        self.policy_step = None

    def sleep(self) -> None:
        """Frees vLLM's memory until the next `refresh`, where it was started for that."""
        self.engine.sleep()

    @contextmanager
    def freeze_weights(self) -> Iterator[None]:
        """Inside, the policy may change during sampling, so it is not pushed to a server that has lost its weights:
        sampling fails with WeightsLost."""
        self.engine.is_frozen = True
        try:
            yield
        finally:
            self.engine.is_frozen = False

    def metrics(self) -> dict[str, Metric]:
        """No numbers of its own."""
        return {}

    def stop(self) -> None:
        """Makes sampling in another thread fail soon."""
        self.engine.is_stopped = True

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        with self.session(options) as session:
            return sample_all(session, requests)

    @contextmanager
    def session(self, options: SamplingOptions) -> Iterator[Session]:
        """A session over vLLM."""
        with ExitStack() as stack:
            with self._lock:
                session = stack.enter_context(self.engine.session(options))
            # An evaluation may sample by other options than training.
            keeps_logprobs = self._keeps_logprobs and self.engine.plain_logprobs(options)
            yield _PolicySession(session, self, keeps_logprobs=keeps_logprobs)

    def close(self) -> None:
        """Ends what this process started of vLLM."""
        self.engine.close()


class _PolicySession:
    """An engine's session that ends when the policy is stopped, waits for pushes, and may drop log-probs."""

    def __init__(self, inner: Session, policy: VLLMPolicy, *, keeps_logprobs: bool):
        self._inner, self._policy, self._keeps_logprobs = inner, policy, keeps_logprobs
        self.submit, self.release, self.abort = inner.submit, inner.release, inner.abort

    def advance(self) -> list[tuple[int, Sample]]:
        """Samples a little; returns the rows that ended. RuntimeError once the policy is stopped."""
        policy = self._policy
        if policy.engine.is_stopped:
            raise RuntimeError(GIVEN_UP)
        if policy._is_pushing:  # leave the lock to the push
            time.sleep(POLL_S)
            return []
        with policy._lock:
            ended = self._inner.advance()
        if self._keeps_logprobs:
            return ended
        return [(ticket, replace(sample, logprobs=None)) for ticket, sample in ended]

    @property
    def num_open(self) -> int:
        """Number of requests submitted that have not ended."""
        return self._inner.num_open
