"""The policy as vLLM serves it in a training run: refreshed before each generation batch, with a known policy step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from groupgrad import dist, stopping
from groupgrad.engines.base import Request, Sample, SamplingOptions, Session, sample_all
from groupgrad.engines.vllm.http import GIVEN_UP
from groupgrad.engines.vllm.vllm_engine import VLLMEngine


class VLLMPolicy:
    """An engine over vLLM whose weights are `model`'s at the last `refresh`.

    With `sends_adapter` a LoRA adapter is sent alone, otherwise all weights. With `keeps_logprobs=False` samples carry
    no log-probs: for sampling options under which vLLM's are of another distribution than training's.
    """

    is_exact = False
    """vLLM computes with kernels of its own, from a copy of the weights."""

    def __init__(
        self, engine: VLLMEngine, model: nn.Module, *, sends_adapter: bool = False, keeps_logprobs: bool = True
    ):
        self.engine, self._model = engine, model
        self._sends_adapter, self._keeps_logprobs = sends_adapter, keeps_logprobs
        self.policy_step: int | None = None
        """Optimizer step of the weights that samples come from; None before the first `refresh`."""

    @property
    def max_model_len(self) -> int:
        """Limit on the tokens of a prompt and its completion together."""
        return self.engine.max_model_len

    def refresh(self, policy_step: int) -> None:
        """Collective. Push the policy's weights of this optimizer step, unless vLLM has them already.

        Nothing may be sampled meanwhile.
        """
        self.engine.is_stopped = False
        if self.policy_step == policy_step:
            return
        self.policy_step = None
        # A push that a signal cuts in half would leave the server waiting.
        with stopping.finishing(), dist.errors_on_all_ranks():
            push = self.engine.push_adapter if self._sends_adapter else self.engine.push
            push(self._model, policy_step)
        self.engine.share_weight_version()
        self.policy_step = policy_step

    def invalidate(self) -> None:
        """Have the next `refresh` push the weights even if the step is the same: the policy may have changed."""
        self.policy_step = None

    def sleep(self) -> None:
        """Free vLLM's memory until the next `refresh`, where it was started for that."""
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

    def stop(self) -> None:
        """Make sampling in another thread fail soon."""
        self.engine.is_stopped = True

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        with self.session(options) as session:
            return sample_all(session, requests)

    @contextmanager
    def session(self, options: SamplingOptions) -> Iterator[Session]:
        """A session over vLLM."""
        with self.engine.session(options) as session:
            yield _PolicySession(session, self.engine, self._keeps_logprobs)

    def close(self) -> None:
        """End what this process started of vLLM."""
        self.engine.close()


class _PolicySession:
    """An engine's session that ends when the policy is stopped, and may drop log-probs."""

    def __init__(self, inner: Session, engine: VLLMEngine, keeps_logprobs: bool):
        self._inner, self._engine, self._keeps_logprobs = inner, engine, keeps_logprobs
        self.submit, self.release = inner.submit, inner.release

    def advance(self) -> list[tuple[int, Sample]]:
        """Sample a little; returns the rows that ended. RuntimeError once the policy is stopped."""
        if self._engine.is_stopped:
            raise RuntimeError(GIVEN_UP)
        ended = self._inner.advance()
        if self._keeps_logprobs:
            return ended
        return [(ticket, replace(sample, logprobs=None)) for ticket, sample in ended]

    @property
    def num_open(self) -> int:
        """Number of requests submitted that have not ended."""
        return self._inner.num_open
