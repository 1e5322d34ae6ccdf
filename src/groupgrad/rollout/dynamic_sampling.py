"""Dynamic sampling: replaces groups without a signal by groups of other prompts (arXiv:2503.14476, section 3.2).

A group whose rewards are all equal has advantages of 0 and teaches nothing. Such a group is discarded whole. Another
prompt is drawn at random in its place, and its completions are sampled and scored. That is repeated for a number of
rounds at most. Which prompts come depends on the seed, the generation batch and the round alone, so a run that is
resumed or repeated draws the same ones, on any number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from groupgrad import dist
from groupgrad.data.columns import read_row
from groupgrad.metrics import Metric, average, mean_of, merge_all
from groupgrad.objectives import Advantages
from groupgrad.rollout.requests import GenerationRequest
from groupgrad.types import RewardTable, Rollout, Turns


@dataclass(slots=True)
class ScoredRollouts:
    """This rank's rollouts of a generation batch, and all ranks' rewards."""

    rollouts: list[Rollout]
    table: RewardTable
    """(B, R) rewards of the rollouts."""
    rewards: torch.Tensor
    """(N, R) rewards of all ranks in row order, NaN where a row has none."""
    lengths: torch.Tensor
    """(N,) float64, the tokens that the policy sampled for each row of all ranks."""
    turns: list[Turns] | None
    """The turns of each row of all ranks; None unless the estimator credits turns."""
    num_tokens: int
    """Tokens of prompts and completions, over all ranks and rounds."""

    def with_groups(self, later: ScoredRollouts, rows: Sequence[int]) -> ScoredRollouts:
        """The same with `rows`, of all ranks, from a later round; metrics of functions, times and tokens of both."""
        place = {rollout.index: index for index, rollout in enumerate(self.rollouts)}
        places = [place[rollout.index] for rollout in later.rollouts]
        rewards, lengths = self.rewards.clone(), self.lengths.clone()
        rewards[rows] = later.rewards[rows]
        lengths[rows] = later.lengths[rows]
        turns = self.turns
        if turns is not None and later.turns is not None:
            turns = _put(turns, rows, [later.turns[row] for row in rows])
        return ScoredRollouts(
            _put(self.rollouts, places, later.rollouts),
            _join(self.table, later.table, places),
            rewards,
            lengths,
            turns,
            self.num_tokens + later.num_tokens,
        )


@dataclass(slots=True, frozen=True)
class DynamicSampling:
    """The further rounds of sampling that a generation batch may take, and the rows that they draw from."""

    num_rounds: int
    dataset: Any
    """The training data, with a length and rows by index."""
    seed: int

    def refill(
        self,
        request: GenerationRequest,
        scored: ScoredRollouts,
        sample: Callable[[GenerationRequest], ScoredRollouts],
        advantages: Callable[[ScoredRollouts, int], Advantages],
    ) -> tuple[ScoredRollouts, Advantages, dict[str, Metric]]:
        """Collective. A generation batch with other groups in the place of those without a signal, its advantages, and
        the metrics of dynamic sampling.

        `dynamic_sampling/rounds` are the further rounds, `dynamic_sampling/discarded` the discarded groups for each
        group of the batch, and `dynamic_sampling/reward` is the mean reward of all completions, also the discarded.
        """
        size = request.num_generations
        result = advantages(scored, size)
        seen, num_discarded, attempt = [result.combined], 0, 0
        while attempt < self.num_rounds and (rows := _rows_without_signal(result, size)):
            attempt += 1
            scored = scored.with_groups(sample(self._redrawn(request, rows, attempt)), rows)
            result = advantages(scored, size)
            seen.append(result.combined[rows])
            num_discarded += len(rows) // size
        rewards = torch.cat(seen)
        metrics = {
            "dynamic_sampling/rounds": average(attempt),
            "dynamic_sampling/discarded": mean_of(num_discarded, request.num_rows // size),
            "dynamic_sampling/reward": mean_of(rewards.nansum(), (~rewards.isnan()).sum()),
        }
        return scored, result, metrics

    def _redrawn(self, first: GenerationRequest, rows: Sequence[int], attempt: int) -> GenerationRequest:
        """Collective. This rank's part of `rows`, which are those of whole groups, with prompts drawn anew."""
        size = first.num_generations
        stream = random.Random(f"{self.seed}/dynamic sampling/{first.number}/{attempt}")
        drawn = stream.sample(range(len(self.dataset)), first.num_rows // size)
        groups = sorted({row // size for row in rows} & set(first.rows_by_group))
        with dist.errors_on_all_ranks():
            rows_by_group = {group: read_row(self.dataset, drawn[group]) for group in groups}
        rows_here = [row for row in first.rows if row // size in rows_by_group]
        return replace(first, rows_by_group=rows_by_group, rows=rows_here, attempt=attempt)


def _rows_without_signal(result: Advantages, num_generations: int) -> list[int]:
    """The rows of the groups of which no row has a signal; a subclass's advantages may flag single rows."""
    flat = result.zero_std.view(-1, num_generations).all(dim=1)
    return flat.repeat_interleave(num_generations).nonzero().flatten().tolist()


def _join(first: RewardTable, later: RewardTable, places: Sequence[int]) -> RewardTable:
    """The first table with the rows at `places` from the later one."""
    rewards = first.rewards.clone()
    rewards[places] = later.rewards
    unlogged: list[Any] = [None] * len(rewards)
    columns = {
        name: _put(first.columns.get(name, unlogged), places, later.columns.get(name, unlogged))
        for name in {**first.columns, **later.columns}
    }
    seconds = {
        name: first.seconds.get(name, 0.0) + later.seconds.get(name, 0.0) for name in {**first.seconds, **later.seconds}
    }
    by_turn = {row: values for row, values in first.by_turn.items() if row not in places}
    by_turn |= {place: later.by_turn[row] for row, place in enumerate(places) if row in later.by_turn}
    return RewardTable(rewards, first.names, columns, merge_all([first.metrics, later.metrics]), seconds, by_turn)


def _put(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values with others at these places."""
    return [*(dict(enumerate(values)) | dict(zip(places, others))).values()]
