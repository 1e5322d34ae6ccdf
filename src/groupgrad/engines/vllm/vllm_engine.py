"""Base classes of the two engines over vLLM and of their sessions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from groupgrad.engines.base import Request, Sample, SamplingOptions, Session, sample_all
from groupgrad.engines.vllm.vllm_params import PROCESSED, is_plain, sampling_fields


@dataclass(slots=True)
class Push:
    """A push, kept so that it can be repeated for a restarted or woken vLLM."""

    model: nn.Module
    kind: Literal["weights", "adapter"]
    policy_step: int
    weight_version: str = field(init=False)
    """The policy step and a suffix that no other push has."""

    def __post_init__(self) -> None:
        self.weight_version = f"{self.policy_step}-{uuid.uuid4().hex[:8]}"


class VLLMEngine:
    """An engine whose weights are those of the last push. Subclasses push and sample.

    `regex` is an expression that every completion must match.
    """

    def __init__(self, regex: str | None = None):
        self._regex = regex
        self._weight_version: str | None = None
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
    def policy_step(self) -> int:
        """Optimizer step of the weights that samples come from. ValueError as for `weight_version`."""
        return int(self.weight_version.rpartition("-")[0])

    @property
    def max_model_len(self) -> int:
        """Limit on the tokens of a prompt and its completion together."""
        raise NotImplementedError

    @property
    def logprobs_mode(self) -> str:
        """vLLM's setting of this name, see `vllm_params`."""
        return PROCESSED

    def plain_logprobs(self, options: SamplingOptions) -> bool:
        """True if log-probs of samples are those of the temperature softmax, as training scores tokens.

        Otherwise they are renormalised over the tokens that cuts, penalties or a regex left.
        """
        return is_plain(sampling_fields(options, regex=self._regex), self.logprobs_mode)

    def push(self, model: nn.Module, policy_step: int) -> str:
        """Send all weights, adapters merged; returns their weight version. Collective if they are sharded."""
        raise NotImplementedError

    def push_adapter(self, model: nn.Module, policy_step: int) -> str:
        """Send the active LoRA adapter alone; returns its weight version. The weights below it are sent once."""
        raise NotImplementedError

    def share_weight_version(self) -> None:
        """Collective after a push on all ranks; does nothing where each rank has an engine with its own weights."""

    def session(self, options: SamplingOptions) -> AbstractContextManager[Session]:
        """A session over the engine; requests that have not ended when it is closed are aborted."""
        raise NotImplementedError

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        with self.session(options) as session:
            return sample_all(session, requests)

    def sleep(self) -> None:
        """Free vLLM's memory until the next push or sample, where it was started for that."""

    def close(self) -> None:
        """End what this process started of vLLM."""


class VLLMSession:
    """Base of sessions over vLLM: numbers requests, and collects new ones until subclasses send them."""

    def __init__(self) -> None:
        self._open: dict[int, Request] = {}
        """Requests that have not ended, by ticket."""
        self._unsent: list[int] = []
        """Tickets of requests that `advance` has to send."""
        self._num_submitted = 0

    def submit(self, request: Request) -> int:
        """Ticket of a request that the next `advance` sends."""
        self._unsent.append(self._register(request))
        return self._unsent[-1]

    def _register(self, request: Request) -> int:
        """A new ticket for this request."""
        ticket = self._num_submitted
        self._num_submitted += 1
        self._open[ticket] = request
        return ticket

    def advance(self) -> list[tuple[int, Sample]]:
        """Send new requests and sample a little; returns the rows that ended, in ticket order."""
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        """Number of requests submitted that have not ended."""
        return len(self._open)

    def release(self, ticket: int) -> None:
        """Do nothing: vLLM's prefix cache is all that is kept of a request."""

    def close(self) -> None:
        """Abort requests that have not ended."""
        raise NotImplementedError
