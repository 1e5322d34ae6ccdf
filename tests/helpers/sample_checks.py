"""Compares samples with those of another engine, and with the scores of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from groupgrad.batching.collate import collate
from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.scoring.forward import ForwardOptions, score_without_gradient
from groupgrad.types import Prompt, Rollout

PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [12, 16])


def requests(num_rows: int = 12, budget: int = 6) -> list[Request]:
    """Rows of prompts of other lengths, in turn."""
    return [Request(PROMPTS[i % len(PROMPTS)], 1000 + i, budget) for i in range(num_rows)]


def drained(session: Any) -> dict[int, Sample]:
    """The samples of a session's rows that have not ended yet, by ticket."""
    samples: dict[int, Sample] = {}
    while session.num_open:
        samples.update(session.advance())
    return samples


def assert_same_samples(
    actual: Sequence[Sample], expected: Sequence[Sample], *, absolute: float = 1e-5, relative: float = 1e-5
) -> None:
    """Equal tokens and reasons; log-probs, and entropies where both engines give them, within the larger tolerance."""
    assert [(s.ids, s.finish_reason) for s in actual] == [(s.ids, s.finish_reason) for s in expected]
    for ours, theirs in zip(actual, expected):
        assert ours.logprobs == pytest.approx(theirs.logprobs, rel=relative, abs=absolute)
        if ours.entropies is not None and theirs.entropies is not None:
            assert ours.entropies == pytest.approx(theirs.entropies, rel=relative, abs=absolute)


def assert_scores_are_the_trainers(
    model: nn.Module, requests: Sequence[Request], samples: Sequence[Sample], options: SamplingOptions
) -> None:
    """Log-probs, and entropies if the engine gives them, are those of a pass without gradients."""
    rollouts = [
        Rollout(
            Prompt(r.prompt_ids, {"prompt": ""}, i), i, s.ids, s.finish_reason, "", "", sampling_logprobs=s.logprobs
        )
        for i, (r, s) in enumerate(zip(requests, samples))
    ]
    batch = collate(rollouts, [0.0] * len(rollouts), mask_truncated=False)
    scores = score_without_gradient(model, batch, ForwardOptions(temperature=options.temperature))
    torch.testing.assert_close(batch.sampling_logprobs, scores.logprobs, rtol=1e-5, atol=1e-5)
    if samples[0].entropies is not None:
        entropies = torch.tensor([e for s in samples for e in s.entropies or []])
        torch.testing.assert_close(entropies, scores.entropy, rtol=1e-5, atol=1e-5)
