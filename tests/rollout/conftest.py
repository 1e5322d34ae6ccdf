"""An engine that plays a script."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from groupgrad.engines.base import BatchEngine, Request, Sample, SamplingOptions


class ScriptedEngine(BatchEngine):
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
