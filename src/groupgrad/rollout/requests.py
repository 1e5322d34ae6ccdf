"""Requests for a generation batch, the sources that answer them with rollouts, and the seeds of rows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from groupgrad import dist
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.errors import RolloutError
from groupgrad.metrics import Metric
from groupgrad.types import Rollout

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class GenerationRequest:
    """This rank's part of a generation batch to sample."""

    rows_by_group: Mapping[int, dict[str, Any]]
    """Data-set rows of this rank's groups."""
    rows: Sequence[int]
    """This rank's row numbers."""
    num_rows: int
    """N, over all ranks."""
    num_generations: int
    phase: str
    number: int
    step: int
    attempt: int = 0
    """0 for the prompts of the data loader; 1, 2, ... for those that dynamic sampling draws in their place."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingOptions` that differ from those of the source, as an evaluation may have them."""

    def seed_of(self, row: int, run_seed: int) -> int:
        """The seed of a row's random stream. It does not depend on the rank or on the other rows of the batch."""
        phase = f"{self.phase}/{self.attempt}" if self.attempt else self.phase
        return row_seed(run_seed, phase, self.number, row)


def training_request(
    plan: GenerationPlan, rank: int, number: int, rows_by_group: Mapping[int, dict[str, Any]], step: int
) -> GenerationRequest:
    """The part of a training generation batch that `rank` samples at this optimizer step."""
    return GenerationRequest(
        rows_by_group=rows_by_group,
        rows=plan.sampled_rows(rank, number),
        num_rows=plan.generation_batch_size,
        num_generations=plan.num_generations,
        phase="train",
        number=number,
        step=step,
    )


class RolloutSource(Protocol):
    """Makes this rank's rollouts of a generation batch, in the order of its row numbers. Local, not a collective."""

    @property
    def is_exact(self) -> bool:
        """True if its log-probs and entropies are those that training would compute (`Engine.is_exact`)."""
        ...

    def __call__(self, request: GenerationRequest) -> list[Rollout]: ...

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """Metrics of this source's rollouts beyond lengths and rewards."""
        return {}

    def close(self) -> None:
        """Releases its resources. May be called any number of times."""


def report_failures(problems: Mapping[int, str], request: GenerationRequest) -> None:
    """Warns, on the main process, of the failed rollouts of all ranks. `problems` are the reasons by row number.

    RolloutError if more than half of a training generation batch failed. An evaluation batch may be a single row, which
    must not end the run.
    """
    first = min(problems)
    share, reason = f"{len(problems)} of {request.num_rows} rollouts", f"the first (row {first}): {problems[first]}"
    if 2 * len(problems) > request.num_rows and request.phase == "train":
        raise RolloutError(f"{share} of step {request.step} failed, more than half; {reason}")
    if dist.is_main():
        logger.warning("step %d: %s failed and are not scored; %s", request.step, share, reason)


def row_seed(run_seed: int, phase: str, generation: int, row: int) -> int:
    """The seed of a row's random stream. It does not depend on the rank or on the other rows of the batch."""
    return _number(f"{run_seed}/{phase}/{generation}/{row}")


def versions_of(tokens: Sequence[int] | None, step: int) -> dict[str, Any]:
    """The fields `policy_version` and `policy_versions` of a rollout.

    `tokens` has, for each token, the optimizer step whose weights sampled it. Without it `step` counts for all tokens,
    the step at which the rollout was requested.
    """
    tokens = tokens or [step]
    return {"policy_version": min(tokens), "policy_versions": list(tokens) if len(set(tokens)) > 1 else None}


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn's random stream, derived from its row's `seed`; the first turn uses the row's seed itself."""
    return seed if turn == 0 else _number(f"{seed}/turn/{turn}")


def _number(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
