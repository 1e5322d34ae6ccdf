"""Makes one generation batch: samples rollouts, scores them, and turns rewards into advantages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, Protocol

import torch

from groupgrad import dist
from groupgrad.activity import Timings
from groupgrad.batch import Batch
from groupgrad.batching.collate import collate
from groupgrad.metrics import Metric
from groupgrad.objectives import (
    Advantages,
    Aggregation,
    ScaleRewards,
    compute_advantages,
    find_estimator,
    reward_metrics,
    reward_spread,
)
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout.dynamic_sampling import DynamicSampling, ScoredRollouts
from groupgrad.rollout.prefetch import RolloutPrefetcher
from groupgrad.rollout.requests import GenerationRequest, RolloutSource, report_failures
from groupgrad.rollout.statistics import completion_metrics, lag_metrics, num_tokens
from groupgrad.types import RewardTable, Rollout, Turns


@dataclass(slots=True, frozen=True)
class ScoringOptions:
    """Options that turn rewards into advantages and rollouts into a batch."""

    reward_weights: tuple[float, ...]
    scale_rewards: ScaleRewards = "group"
    aggregation: Aggregation = "sum_then_normalize"
    estimator: str = "group"
    """A name that `find_estimator` knows."""
    estimator_settings: Any = None
    mask_truncated: bool = False
    """Take the tokens of truncated completions out of the loss."""

    def advantages(
        self,
        rewards: torch.Tensor,
        num_generations: int,
        lengths: torch.Tensor | None = None,
        turns: Sequence[Turns] | None = None,
    ) -> Advantages:
        """`compute_advantages` of all ranks' (N, R) rewards with these options."""
        return compute_advantages(
            *(rewards, self.reward_weights, num_generations, self.scale_rewards, self.aggregation),
            estimator=self.estimator,
            settings=self.estimator_settings,
            lengths=lengths,
            turns=turns,
        )


@dataclass(slots=True)
class Experience:
    """This rank's part of a finished generation batch."""

    rollouts: list[Rollout]
    advantages: torch.Tensor
    """(B,) float64."""
    by_turn: list[torch.Tensor] | None
    """(T,) float64 advantages of the turns of each rollout, if its estimator credits turns."""
    batch: Batch
    """The rollouts with their advantages, on the CPU; the totals are filled in with the optimizer step."""
    metrics: dict[str, Metric]
    num_tokens: int
    """Over all ranks."""
    mean_reward: float
    """Over all ranks; NaN if nothing was scored."""
    table: RewardTable
    """(B, R) rewards of the rollouts."""
    combined_rewards: list[float]
    """(B,) weighted sums of the rollouts' rewards, NaN where nothing was scored."""


class ScoreRollouts(Protocol):
    """The rewards of finished rollouts of this rank, at least one: (B, R) in their order, NaN where not scored."""

    def __call__(self, rollouts: Sequence[Rollout], *, trainer_state: Any, step: int) -> RewardTable: ...


ComputeAdvantages = Callable[..., Advantages]
"""The advantages of all ranks' N rows from their (N, R) rewards and the completions of a group; also, if it takes them,
from `lengths`, the tokens that the policy sampled, and `turns`, which are None unless the estimator credits turns."""


class ExperienceCollector:
    """Makes scored generation batches. Collective: every rank takes part, also without rows of its own.

    `score_rollouts` and `compute_advantages` are the trainer's methods, which a subclass may define. vLLM samples
    through a `prefetcher`, which sends it the policy's weights. Any other engine samples inside the context that
    `around` makes, which all ranks enter and leave together. `dynamic` replaces groups without a signal in training.
    """

    def __init__(
        self,
        rollouts: RolloutSource,
        rewards: RewardRunner,
        options: ScoringOptions,
        timings: Timings,
        prefetcher: RolloutPrefetcher | None = None,
        *,
        score_rollouts: ScoreRollouts,
        compute_advantages: ComputeAdvantages,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        dynamic: DynamicSampling | None = None,
    ):
        self.rollouts, self.rewards = rollouts, rewards
        self._score_rollouts, self._compute_advantages = score_rollouts, compute_advantages
        # A subclass's `compute_advantages` need not take all arguments.
        parameters = signature(compute_advantages).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self._taken = {name for name in ("lengths", "turns") if takes_all or name in parameters}
        self.options, self.timings = options, timings
        self._around, self._dynamic = around, dynamic
        self._others: list[ExperienceCollector] = []
        self._prefetcher, self._sample = prefetcher, prefetcher or self._sample_here
        self._measures_lag = prefetcher is not None and prefetcher.ahead > 0

    def with_rewards(self, rewards: RewardRunner) -> ExperienceCollector:
        """A collector that samples as this one does and scores by other rewards, each of weight 1; it closes with this.

        No hook of the trainer is called, since those of a subclass are made for its own rewards. The estimator is
        `group`, since another one may not be for rewards such as these.
        """
        options = replace(self.options, reward_weights=rewards.weights, estimator="group", estimator_settings=None)
        parts = self.rollouts, rewards, options, self.timings, self._prefetcher
        functions: dict[str, Any] = {"score_rollouts": rewards.score, "compute_advantages": options.advantages}
        other = ExperienceCollector(*parts, **functions, around=self._around)
        self._others.append(other)
        return other

    def __call__(
        self, request: GenerationRequest, *, trainer_state: Any, upcoming: Sequence[GenerationRequest] = ()
    ) -> Experience:
        """Collective. Samples and scores one generation batch; the batches `upcoming` may be begun already.

        A failure on any rank is raised on all of them, and a RolloutError if more than half of the generation batch's
        rollouts failed, over all ranks.
        """
        scored, refills = self._scored(request, trainer_state, upcoming), {}
        if self._dynamic is not None and request.phase == "train":
            sample = partial(self._scored, trainer_state=trainer_state)
            scored, result, refills = self._dynamic.refill(request, scored, sample, self._advantages_of)
        else:
            result = self._advantages_of(scored, request.num_generations)
        rollouts, table = scored.rollouts, scored.table
        rows = [rollout.index for rollout in rollouts]
        advantages = result.advantages[rows]
        metrics = {
            **completion_metrics(rollouts),
            **reward_metrics(scored.rewards, table.names, result),
            **refills,
            **self.rollouts.metrics(rollouts),
            **table.metrics,
        }
        if self._measures_lag and rollouts:
            metrics |= lag_metrics(rollouts, request.step)
        by_turn = None if result.by_turn is None else [result.by_turn[row] for row in rows]
        if by_turn is not None:
            _check_means(advantages, by_turn, rollouts)
        batch = collate(rollouts, advantages, by_turn, mask_truncated=self.options.mask_truncated)
        return Experience(
            rollouts,
            advantages,
            by_turn,
            batch,
            metrics,
            num_tokens=scored.num_tokens,
            mean_reward=float(result.combined.nanmean()),
            table=table,
            combined_rewards=result.combined[rows].tolist(),
        )

    def _advantages_of(self, scored: ScoredRollouts, num_generations: int) -> Advantages:
        more = {name: getattr(scored, name) for name in self._taken}
        return self._compute_advantages(scored.rewards, num_generations, **more)

    def _scored(
        self, request: GenerationRequest, trainer_state: Any, upcoming: Sequence[GenerationRequest] = ()
    ) -> ScoredRollouts:
        """Collective. Samples and scores what a request asks for."""
        rollouts = self._sample(request, upcoming)
        score = (
            self._score_rollouts if rollouts else self.rewards.score
        )  # a subclass need not score a rank without rollouts
        with dist.errors_on_all_ranks(), self.timings.phase("rewards"):
            table = score(rollouts, trainer_state=trainer_state, step=request.step)
        uses_turns = find_estimator(self.options.estimator).uses_turns
        turns_here = [turns_of(rollout, table, row) for row, rollout in enumerate(rollouts)] if uses_turns else []
        rewards, lengths, turns, tokens, problems = _gather_rewards(rollouts, table, turns_here, request.num_rows)
        if problems:
            report_failures(problems, request)
        return ScoredRollouts(rollouts, table, rewards, lengths, turns if uses_turns else None, tokens)

    @staticmethod
    def spread(batches: Sequence[tuple[RewardTable, Sequence[float]]]) -> dict[str, float]:
        """Collective. Standard deviations of the rewards over all rows of several generation batches and all ranks.

        `batches` has this rank's rewards and their weighted sums. A deviation over fewer than two rows is left out.
        """
        names = batches[0][0].names if batches else ()
        by_rank = dist.all_gather_objects([(table.rewards.double(), combined) for table, combined in batches])
        parts = [part for batch in zip(*by_rank) for part in batch]  # in row order, so that no sum depends on the cut
        if not parts:
            return {}
        combined = torch.tensor([value for _, values in parts for value in values], dtype=torch.float64)
        spread = reward_spread(torch.cat([rewards for rewards, _ in parts]), names, combined)
        numbers = {name: metric.read() for name, metric in spread.items()}
        return {name: number for name, number in numbers.items() if number is not None}

    def close(self) -> None:
        """Releases the engine, tools, environments and reward workers. May be called any number of times."""
        for rewards in (self.rewards, *(other.rewards for other in self._others)):
            rewards.close_workers()
        if self._prefetcher is not None:
            self._prefetcher.close()
        self.rollouts.close()

    def _sample_here(self, request: GenerationRequest, upcoming: Sequence[GenerationRequest]) -> list[Rollout]:
        """Collective. This rank's rollouts, in the order of its row numbers."""
        with self.timings.phase("sampling"), self._around(), dist.errors_on_all_ranks():
            return self.rollouts(request)


def turns_of(rollout: Rollout, table: RewardTable, row: int) -> Turns:
    """The turns of a rollout, which is a row of the table."""
    spans, total = rollout.turns, table.rewards[row].double()
    rewards = torch.full((len(spans), len(table.names)), torch.nan, dtype=torch.float64)
    rewards = table.by_turn.get(row, rewards).clone()
    # What `rewards` has beyond the sums, such as all of it, belongs to the whole rollout.
    beyond = total - rewards.nansum(dim=0)
    is_beyond = ~(beyond.abs() <= 1e-9 * total.abs()) & ~total.isnan()
    rewards[-1:] = torch.where(is_beyond, rewards[-1:].nan_to_num(nan=0.0) + beyond, rewards[-1:])
    rewards[:, total.isnan()] = torch.nan
    return Turns([end - start for start, end in spans], rewards, rollout.states or _states_read(rollout))


def _states_read(rollout: Rollout) -> list[str]:
    """A digest of the tokens that the model read before each turn: its prompt, then the reply to its last turn."""
    spans, ids = rollout.turns, rollout.completion_ids
    tokens = [rollout.prompt.ids, *(ids[end:start] for (_, end), (start, _) in pairwise(spans))][: len(spans)]
    # Images that a tool returned are told apart only as a whole: turns behind them are in states of their own.
    first, later = ("" if media is None else media.key for media in (rollout.prompt.media, rollout.media))
    read = [f"{part}{first if turn == 0 else later}" for turn, part in enumerate(tokens)]
    return [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in read]


def _check_means(advantages: torch.Tensor, by_turn: Sequence[torch.Tensor], rollouts: Sequence[Rollout]) -> None:
    """ValueError if a row's advantage is not the mean of those of its turns, as where a subclass changed one alone."""
    for advantage, of_turns, rollout in zip(advantages.tolist(), by_turn, rollouts):
        lengths = [end - start for start, end in rollout.turns]
        mean = sum(value * length for value, length in zip(of_turns.tolist(), lengths)) / max(1, sum(lengths))
        if abs(advantage - mean) > 1e-6 * max(1.0, abs(mean)):
            raise ValueError(
                f"compute_advantages gave row {rollout.index} the advantage {advantage:g}, but the mean over the "
                f"tokens of its turns (Advantages.by_turn) is {mean:g}. The turns are what trains: change by_turn too, "
                "or set it to None"
            )


def _gather_rewards(
    rollouts: list[Rollout], table: RewardTable, turns_here: list[Turns], num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, list[Turns], int, dict[int, str]]:
    """Collective. The generation batch's (N, R) rewards, (N,) lengths and turns in row order, its tokens, and the
    reasons of failed rows."""
    problem_of_row = {r.index: r.trace.problem if r.trace else "" for r in rollouts if not r.is_scorable}
    rows = [rollout.index for rollout in rollouts]
    lengths_here = torch.tensor([rollout.num_sampled for rollout in rollouts], dtype=torch.float64)
    here = (rows, table.rewards, lengths_here, turns_here, num_tokens(rollouts), problem_of_row)
    parts = dist.all_gather_objects(here)
    rewards = torch.full((num_rows, len(table.names)), float("nan"), dtype=torch.float64)
    lengths = torch.zeros(num_rows, dtype=torch.float64)
    turns = [Turns([], rewards[:0], [])] * num_rows
    for indices, values, counted, of_rows, _, _ in parts:
        rewards[indices], lengths[indices] = values.double(), counted
        for row, found in zip(indices, of_rows):
            turns[row] = found
    problems = {row: problem for *_, part in parts for row, problem in part.items()}
    return rewards, lengths, turns, sum(tokens for *_, tokens, _ in parts), problems
