"""Builds the runners of training's and of evaluation's rewards."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

from groupgrad import dist
from groupgrad.config import GRPOConfig
from groupgrad.config.unused_settings import unused_reward_settings
from groupgrad.rewards.reward_runner import RewardRunner, check_failure_names
from groupgrad.rollout.sources import RolloutComponents
from groupgrad.trainer import component_options

logger = logging.getLogger(__name__)


def build_rewards(
    config: GRPOConfig,
    reward_funcs: Any,
    processing_classes: Any,
    eval_reward_funcs: Any,
    rollout_components: RolloutComponents,
) -> tuple[RewardRunner, RewardRunner]:
    """The runners of the reward functions and models of training, and of evaluation: the same one without
    `eval_reward_funcs`. Environments' own rewards are among both.

    ValueError if there is not one weight for each of training's, or if a setting names a function that is in neither.
    """
    models, supervision = component_options.reward_model_options(config), component_options.supervision_options(config)
    shared: dict[str, Any] = {"environment_names": rollout_components.reward_names, "supervision": supervision}
    rewards = RewardRunner(reward_funcs, processing_classes, models=models, **shared)
    eval_rewards = rewards
    if eval_reward_funcs is not None:
        eval_rewards = RewardRunner(eval_reward_funcs, models=replace(models, argument="eval_reward_funcs"), **shared)
    check_failure_names(supervision, list(dict.fromkeys([*rewards.function_names, *eval_rewards.function_names])))
    _warn_of_unused(config, rewards, eval_rewards)
    num_given = len(rollout_components.reward_names)
    component_options.scoring_options(config, len(rewards.names) - num_given, num_given)
    plan = component_options.generation_plan(config)
    if rewards.has_functions and not plan.samples_whole_groups and dist.is_main():
        logger.warning(
            "reward functions see parts of groups: a process samples %d completions of a generation batch, which "
            "num_generations=%d does not divide; where a function compares the completions of a prompt, make "
            "per_device_train_batch_size x steps_per_generation (%d x %d) a multiple of it",
            *(plan.rows_per_rank, plan.num_generations, plan.micro_batch_rows, plan.steps_per_generation),
        )
    return rewards, eval_rewards


def _warn_of_unused(config: GRPOConfig, rewards: RewardRunner, eval_rewards: RewardRunner) -> None:
    """Warnings of settings that none of the rewards makes use of."""
    num_workers = max(rewards.num_workers, eval_rewards.num_workers)
    if config.reward_workers > num_workers:
        warnings.warn(
            f"reward_workers={config.reward_workers} starts {num_workers}: each function runs in one process, "
            "but async functions, reward models and accuracy rewards, which have processes of their own, in none"
        )
    models = [*rewards.models, *eval_rewards.models]
    by_name = any(model.is_by_name for model in models)
    if unused := unused_reward_settings(config, models=bool(models), by_name=by_name):
        warnings.warn(unused)
