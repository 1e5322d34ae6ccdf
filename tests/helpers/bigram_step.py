"""A policy small enough to see through, and generation batches that it sampled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from groupgrad.batch import Batch, TokenScores
from groupgrad.batching.collate import collate
from groupgrad.batching.micro_batches import MicroBatch
from groupgrad.metrics import merge_all
from groupgrad.objectives import FORWARD_AND_BACKWARD, NO_PASS, PolicyOptions, policy_loss, sampler_scores
from groupgrad.types import Prompt, Rollout

VOCABULARY = 7


class Bigram(nn.Module):
    """Logits of the next token from the last one and from the prompt's first, in float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.last = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64))
        self.first = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64))
        self.seen: list[int] = []
        """Completion tokens of each pass."""

    def forward(self, batch: Batch) -> TokenScores:
        self.seen.append(batch.num_tokens)
        bounds, prompts = batch.prompt_offsets[batch.prompt_of_row], batch.prompt_ids
        last = batch.completion_ids.roll(1)
        starts = batch.offsets[:-1][batch.offsets.diff() > 0]
        last[starts] = prompts[batch.prompt_offsets[1:][batch.prompt_of_row] - 1][batch.offsets.diff() > 0]
        logits = self.last[last] + self.first[prompts[bounds]][batch.row_of_token]
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return TokenScores(logprobs.gather(-1, batch.completion_ids[:, None]).squeeze(-1), entropy)

    def gradient(self) -> torch.Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in self.parameters() if parameter.grad is not None])


def make_micro_batches(policy: Bigram, *, mask_truncated: bool = False) -> list[Batch]:
    """Ragged rows in groups of four, sampled in step 5; the second group and single rows of others have no signal."""
    sizes = (6, 6, 4)
    rng = random.Random(1)
    rows = sum(sizes)
    prompts = [Prompt([rng.randrange(VOCABULARY) for _ in range(1 + g % 3)], {"prompt": ""}, g) for g in range(rows)]
    rollouts = []
    for row in range(rows):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 3, 6, 9)))]
        sampled = [rng.random() < 0.9 for _ in ids]
        reason: Any = "length" if row % 5 == 3 else "eos"
        rollouts.append(Rollout(prompts[row // 4], row, ids, reason, "", "", sampled=sampled, policy_version=5))
    advantages = [0.0 if row // 4 == 1 or row % 7 == 0 else rng.gauss(0, 1) for row in range(rows)]
    batches, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        batch = collate(rollouts[part], advantages[part], mask_truncated=mask_truncated)
        with torch.no_grad():
            scores = policy(batch)
        batches.append(replace(batch, sampling_logprobs=scores.logprobs, sampling_entropy=scores.entropy))
        start += size
    policy.seen.clear()
    return batches


def run_step(
    policy: Bigram,
    scores: Iterable[tuple[Batch, TokenScores]],
    options: PolicyOptions,
    **terms: Any,
) -> tuple[float, dict[str, float | None], torch.Tensor]:
    """Loss, metrics and gradient of a step whose parts have these scores."""
    policy.zero_grad()
    results = [policy_loss(of_batch, batch, options, **terms) for batch, of_batch in scores]
    total = torch.stack([result.loss for result in results]).sum()
    total.backward()
    metrics = merge_all(result.metrics for result in results)
    return float(total.detach()), {name: metric.read() for name, metric in metrics.items()}, policy.gradient()


def as_step(batches: Sequence[Batch]) -> tuple[Batch, list[range]]:
    """The rows of all micro-batches as one batch, and the rows of each."""
    bounds = list(accumulate((batch.num_rows for batch in batches), initial=0))
    return Batch.concat(batches), [range(start, end) for start, end in pairwise(bounds)]


def scored(part: MicroBatch, score: Callable[[Batch], TokenScores]) -> tuple[Batch, TokenScores]:
    """A part's rows, and their scores by the passes that they need."""
    batch = part.batch
    if part.passes == NO_PASS:
        return batch, sampler_scores(batch)
    with torch.set_grad_enabled(part.passes == FORWARD_AND_BACKWARD):
        return batch, score(batch)


@pytest.fixture
def policy() -> Bigram:
    return Bigram()


@pytest.fixture
def sample() -> Callable[..., list[Batch]]:
    return make_micro_batches


@pytest.fixture
def step() -> Callable[..., Any]:
    return run_step
