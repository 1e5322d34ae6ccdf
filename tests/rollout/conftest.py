"""An engine that plays a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.types import Prompt, Rollout


class ScriptedEngine:
    """Answers the n-th request of a call with the n-th sample, and keeps what it was asked."""

    def __init__(self, samples: Sequence[Sample]):
        self.samples = list(samples)
        self.asked: list[Request] = []
        self.options: SamplingOptions | None = None

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        self.asked, self.options = list(requests), options
        return self.samples[: len(requests)]


@pytest.fixture
def play() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    """A rollout of `num_tokens` tokens."""

    def make(num_tokens: int, reason: Any = "eos", index: int = 0, group: int = 0, **fields: Any) -> Rollout:
        prompt = Prompt([5, 6, 7], {"prompt": "abc"}, group)
        return Rollout(prompt, index, [9] * num_tokens, reason, "text", "text", **fields)

    return make
