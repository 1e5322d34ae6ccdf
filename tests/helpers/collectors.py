"""A collector of generation batches with the trainer's rewards and advantages."""

from __future__ import annotations

from typing import Any

from groupgrad.activity import Timings
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout.collector import ExperienceCollector, ScoringOptions
from groupgrad.rollout.requests import RolloutSource


def make_collector(
    rollouts: RolloutSource, rewards: RewardRunner, options: ScoringOptions, timings: Timings | None = None, **more: Any
) -> ExperienceCollector:
    """A collector; `more` are further arguments of its own."""
    functions = {"score_rollouts": rewards.score, "compute_advantages": options.advantages, **more}
    return ExperienceCollector(rollouts, rewards, options, timings or Timings(), **functions)
