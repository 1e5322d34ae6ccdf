"""One generation round: sample, score, turn rewards into advantages, make the micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from groupgrad import dist
from groupgrad.batch import Batch
from groupgrad.batching.collate import collate
from groupgrad.metrics import Metric, maximum
from groupgrad.objectives import Advantages, compute_advantages, reward_metrics
from groupgrad.rewards.runner import RewardRunner
from groupgrad.rollout.base import GenerationRequest, RolloutSource, check_failures, problems_of
from groupgrad.rollout.prefetch import RolloutPrefetcher, Weights
from groupgrad.rollout.statistics import completion_metrics, log_records, num_tokens
from groupgrad.telemetry.render import without_images
from groupgrad.telemetry.timings import Timings
from groupgrad.types import RewardTable, Rollout


@dataclass(slots=True, frozen=True)
class ScoringOptions:
    """How rewards become advantages."""

    reward_weights: tuple[float, ...]
    scale_rewards: str = "group"
    aggregation: str = "sum_then_normalize"
    keep_records: bool = False
    """Gather every rollout on the main process for the completions table."""
    keep_images: bool = False
    """With their images, for trackers that show them."""


@dataclass(slots=True)
class Experience:
    """A finished round, this rank's part."""

    rollouts: list[Rollout]
    advantages: list[float]
    metrics: dict[str, Metric]
    num_tokens: int
    """Over all ranks."""
    mean_reward: float
    """Over all ranks; NaN if nothing was scored."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Of all ranks, in row order; empty unless asked for."""

    def micro_batch(self, rows: Sequence[int], *, mask_truncated: bool) -> Batch:
        """The rollouts with these row numbers as a batch; its totals are filled in with the optimizer step."""
        place = {rollout.index: i for i, rollout in enumerate(self.rollouts)}
        chosen = [place[row] for row in rows]
        return collate(
            [self.rollouts[i] for i in chosen], [self.advantages[i] for i in chosen], mask_truncated=mask_truncated
        )


class ExperienceCollector:
    """Makes scored rounds. Collective: every rank takes part in every round, also without rows of its own."""

    def __init__(
        self,
        rollouts: RolloutSource,
        rewards: RewardRunner,
        options: ScoringOptions,
        timings: Timings,
        weights: Weights | None = None,
        *,
        ahead: int = 0,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.rollouts, self.rewards = rollouts, rewards
        self.options, self.timings = options, timings
        self._supply = RolloutPrefetcher(rollouts, timings, weights, ahead=ahead, around=around)

    def __call__(
        self, request: GenerationRequest, *, trainer_state: Any, upcoming: Sequence[GenerationRequest] = ()
    ) -> Experience:
        """Collective. Sample and score one round. A failure on any rank is raised on all of them, and a RolloutError if
        more than half of the round's rollouts failed, over all ranks. The rounds `upcoming` may be begun already."""
        table = RewardTable(torch.zeros(0, len(self.rewards.names), dtype=torch.float64), list(self.rewards.names))
        rollouts = self._supply(request, upcoming)
        with dist.together(), self.timings.phase("rewards"):
            if rollouts:
                table = self.rewards.score(rollouts, trainer_state=trainer_state, step=request.step)
        return self._finish(request, rollouts, table)

    def close(self) -> None:
        """Let go of what makes rollouts. May be called any number of times."""
        self._supply.close()

    def _finish(self, request: GenerationRequest, rollouts: list[Rollout], table: RewardTable) -> Experience:
        rewards, tokens, problems = _gather_rewards(rollouts, table, request.num_rows)
        check_failures(problems, request, quiet=not dist.is_main())
        result = compute_advantages(
            rewards,
            torch.tensor(self.options.reward_weights, dtype=torch.float64),
            request.num_generations,
            self.options.scale_rewards,  # pyright: ignore[reportArgumentType]
            self.options.aggregation,  # pyright: ignore[reportArgumentType]
        )
        advantages = [float(result.advantages[rollout.index]) for rollout in rollouts]
        records: list[dict[str, Any]] = []
        if self.options.keep_records:
            records = log_records(rollouts, table, advantages, request.step)
            if not self.options.keep_images:
                records = [without_images(record) for record in records]
            records = _gather_records(rollouts, records)
        metrics = {
            **completion_metrics(rollouts),
            **reward_metrics(rewards, table.names, result),
            **self.rollouts.metrics(rollouts),
            **table.metrics,
        }
        if self._supply.ahead and rollouts:
            lag = request.step - min(rollout.policy_version for rollout in rollouts)
            metrics["sampling/policy_lag"] = maximum(float(lag))
        return Experience(rollouts, advantages, metrics, tokens, _mean_reward(result), records)


def _gather_rewards(
    rollouts: list[Rollout], table: RewardTable, num_rows: int
) -> tuple[torch.Tensor, int, dict[int, str]]:
    """Collective. The whole round's (N, R) rewards in row order, its tokens, and why rows failed."""
    mine = ([rollout.index for rollout in rollouts], table.rewards, num_tokens(rollouts), problems_of(rollouts))
    parts = dist.all_gather_objects(mine)
    rewards = torch.full((num_rows, len(table.names)), float("nan"), dtype=torch.float64)
    for indices, values, _, _ in parts:
        rewards[indices] = values.double()
    problems = {row: problem for *_, part in parts for row, problem in part.items()}
    return rewards, sum(tokens for _, _, tokens, _ in parts), problems


def _gather_records(rollouts: list[Rollout], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collective. Everybody's records in row order, on the main process."""
    parts = dist.all_gather_objects([(rollout.index, record) for rollout, record in zip(rollouts, records)])
    if not dist.is_main():
        return []
    return [record for _, record in sorted((item for part in parts for item in part), key=lambda item: item[0])]


def _mean_reward(result: Advantages) -> float:
    return float(result.combined.nanmean())
