"""Base class of the two engines over vLLM."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from groupgrad.engines.base import Request, Sample, SamplingOptions, Session, sample_all
from groupgrad.integrations.vllm.vllm_params import PROCESSED, is_plain, sampling_fields


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
        """Sends the active LoRA adapter alone; returns its weight version. Collective if it is sharded.

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
