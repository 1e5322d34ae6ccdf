"""A collector of generation batches with the trainer's rewards and advantages."""

from __future__ import annotations

from typing import Any

import torch

from groupgrad.objectives import Advantages, compute_advantages
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout.collector import ExperienceCollector, ScoringOptions
from groupgrad.rollout.requests import RolloutSource
from groupgrad.run_folder.timings import Timings


def make_collector(
    rollouts: RolloutSource, rewards: RewardRunner, options: ScoringOptions, timings: Timings | None = None, **more: Any
) -> ExperienceCollector:
    """A collector; `more` are further arguments of its own."""

    def advantages(table: torch.Tensor, num_generations: int, lengths: torch.Tensor, turns: Any) -> Advantages:
        weights, scale, aggregation = options.reward_weights, options.scale_rewards, options.aggregation
        more = {"estimator": options.estimator, "settings": options.estimator_settings}
        return compute_advantages(
            table, weights, num_generations, scale, aggregation, lengths=lengths, turns=turns, **more
        )

    functions = {"score": rewards.score, "advantages": advantages, **more}
    return ExperienceCollector(rollouts, rewards, options, timings or Timings(), **functions)
