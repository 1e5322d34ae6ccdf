"""Converts the flat configuration into the options of each room. No room below reads `GRPOConfig`."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.batching.loader import LoaderOptions
from groupgrad.config import GRPOConfig
from groupgrad.config.sampling import has_comparable_logprobs
from groupgrad.config.settings import mapping
from groupgrad.engines.selection import EngineOptions
from groupgrad.envs.tools import ToolOptions
from groupgrad.objectives import (
    Aggregation,
    MismatchMode,
    MismatchOptions,
    PolicyOptions,
    ScaleRewards,
    find_estimator,
    find_mask,
    find_method,
)
from groupgrad.rewards.function_calls import SupervisionOptions
from groupgrad.rewards.model_loading import RewardModelOptions, hub_kwargs
from groupgrad.rollout.agent import AgentOptions
from groupgrad.rollout.collector import ScoringOptions
from groupgrad.rollout.dynamic_sampling import DynamicSampling
from groupgrad.scoring.forward import ForwardOptions


def generation_plan(config: GRPOConfig) -> GenerationPlan:
    """Returns the sizes of generation batches, micro-batches and groups."""
    plan = GenerationPlan(
        micro_batch_rows=config.per_device_train_batch_size,
        world_size=config.world_size,
        accumulation=config.gradient_accumulation_steps,
        steps_per_generation=config.steps_per_generation_resolved,
        num_iterations=config.num_iterations,
        num_generations=cast(int, config.num_generations),
    )
    # Rows of a generation batch that serves one step stay as they are.
    shuffles = config.shuffle_rows == "rows" and plan.num_windows > 1
    return dataclasses.replace(plan, shuffle_seed=config.seed) if shuffles else plan


def loader_options(config: GRPOConfig) -> LoaderOptions:
    """Returns the options of the training data loader."""
    return LoaderOptions(
        shuffle=bool(config.shuffle_dataset),
        seed=_data_seed(config),
        drop_last=config.dataloader_drop_last,
        num_workers=config.dataloader_num_workers,
        prefetch_factor=config.dataloader_prefetch_factor,
        persistent_workers=config.dataloader_persistent_workers,
        multiprocessing_context=getattr(config, "dataloader_multiprocessing_context", None),
        ahead=config.rollout_ahead,
    )


def dynamic_sampling(config: GRPOConfig, train_dataset: Any) -> DynamicSampling:
    """Returns the rounds in which groups without a signal are replaced, by prompts of the training data."""
    return DynamicSampling(config.dynamic_sampling_rounds, train_dataset, _data_seed(config))


def _data_seed(config: GRPOConfig) -> int:
    return config.seed if config.data_seed is None else config.data_seed


def advantage_settings(config: GRPOConfig) -> Any:
    """Returns the settings of the advantage estimator, or None."""
    return find_estimator(config.advantage_estimator).make_settings(mapping(config.advantage_settings))


def agent_options(config: GRPOConfig) -> AgentOptions:
    """Returns the options of agents, their tools and environments."""
    state = find_estimator(config.advantage_estimator).state
    return AgentOptions(
        max_tool_calling_iterations=config.max_tool_calling_iterations,
        tools=ToolOptions(
            timeout_s=float(config.tool_timeout_s),
            max_result_chars=config.tool_max_result_chars,
            num_threads=config.tool_threads,
        ),
        ahead=config.rollout_ahead,
        state=None if state is None else state(advantage_settings(config)),
    )


def program_options(config: GRPOConfig) -> dict[str, Any]:
    """Returns the options of agents that are programs."""
    return {"timeout_s": float(config.agent_timeout_s), "sampling": config.agent_sampling}


def engine_options(config: GRPOConfig) -> EngineOptions:
    """Returns the choice of sampling engine and its options."""
    return EngineOptions(
        engine=config.rollout_engine,
        kv_memory=config.engine_kv_memory_resolved,
        max_rows=config.per_device_train_batch_size * config.gradient_accumulation_steps,
        continuous_batching=mapping(config.transformers_continuous_batching_config)
        if config.use_transformers_continuous_batching
        else None,
    )


def longest_completion(config: GRPOConfig, max_context: int | None) -> int:
    """Returns the number of tokens that a completion can have at most, after a prompt of one."""
    longest = config.max_new_tokens_resolved
    return longest if max_context is None else min(longest, max_context - 1)


def policy_options(config: GRPOConfig, max_context: int | None = None) -> PolicyOptions:
    """Returns the options of the objective for a model with this many positions.

    Only vLLM, which has weights of its own, needs a mismatch correction.
    """
    mismatch = None
    if config.use_vllm and config.vllm_importance_sampling_correction and has_comparable_logprobs(config):
        mismatch = MismatchOptions(
            mode=cast(MismatchMode, config.vllm_importance_sampling_mode),
            clip_min=config.vllm_importance_sampling_clip_min,
            clip_max=config.vllm_importance_sampling_clip_max,
        )
    # Most fields have the same name in both records.
    values = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(PolicyOptions)}
    settings = find_method(config.loss_type).make_settings(mapping(config.loss_settings))
    if config.off_policy_mask is not None:
        values["mask_settings"] = find_mask(config.off_policy_mask).make_settings(
            mapping(config.off_policy_mask_settings)
        )
    values |= {"settings": settings, "epsilon_high": config.epsilon_high_resolved, "mismatch": mismatch}
    longest = min(cast(int, config.max_completion_length), longest_completion(config, max_context))
    return PolicyOptions(**{**values, "max_completion_length": longest})


def forward_options(config: GRPOConfig, *, pad_id: int, aux_loss: bool) -> ForwardOptions:
    """Returns the options of a forward pass that scores completion tokens."""
    return ForwardOptions(
        temperature=config.temperature_resolved,
        pad_id=pad_id,
        entropy_gradient=config.entropy_coef != 0.0 or config.use_adaptive_entropy,
        aux_loss=aux_loss,
    )


def reward_model_options(config: GRPOConfig) -> RewardModelOptions:
    """Returns the options of reward models. They share only the policy's download options."""
    return RewardModelOptions(
        device=config.reward_model_device or config.device,
        init_kwargs={
            **hub_kwargs(mapping(config.model_init_kwargs)),
            **mapping(config.reward_model_init_kwargs),
        },
        trust_remote_code=config.trust_remote_code,
        chat_template_kwargs=mapping(config.chat_template_kwargs),
        batch_tokens=config.reward_model_batch_tokens,
        offload=config.reward_model_offload,
    )


def supervision_options(config: GRPOConfig) -> SupervisionOptions:
    """Returns the deadlines, workers, retries and failures of reward functions."""
    memory_gb = config.reward_worker_memory_gb
    options = SupervisionOptions(
        timeout_s=config.reward_timeout_s,
        num_workers=config.reward_workers,
        worker_memory_bytes=None if memory_gb is None else int(memory_gb * 2**30),
        retries=config.reward_retries,
        on_failure=config.on_reward_failure_resolved,
        seed=config.seed,
    )
    names = config.reward_transient_errors
    return options if names is None else dataclasses.replace(options, transient_errors=tuple(names))


def scoring_options(config: GRPOConfig, num_rewards: int, num_given: int = 0) -> ScoringOptions:
    """Returns the options of the way from rewards to advantages.

    `num_given` is the number of environments that score their rollouts; such a reward has weight 1. ValueError if
    `reward_weights` does not have `num_rewards` entries, or weights that the estimator is not for.
    """
    weights = config.reward_weights
    if weights is not None and len(weights) != num_rewards:
        raise ValueError(
            f"reward_weights has {len(weights)} entries ({weights}), but there are {num_rewards} reward functions; "
            "give one weight for each"
        )
    reward_weights = (*(float(weight) for weight in weights or (1.0,) * num_rewards), *(1.0,) * num_given)
    counting = [weight for weight in reward_weights if weight != 0]
    if find_estimator(config.advantage_estimator).binary and len(counting) > 1 and set(counting) != {1.0}:
        raise ValueError(
            f"advantage_estimator={config.advantage_estimator!r} is for rewards of 0 or 1, but with the weights "
            f"{reward_weights} successes sum to other numbers. Give rewards that count the weight 1 in reward_weights, "
            "and all others the weight 0, or use advantage_estimator='group'"
        )
    return ScoringOptions(
        reward_weights=reward_weights,
        scale_rewards=cast(ScaleRewards, str(config.scale_rewards)),
        aggregation=cast(Aggregation, config.multi_objective_aggregation),
        estimator=config.advantage_estimator,
        estimator_settings=advantage_settings(config),
        mask_truncated=config.mask_truncated_completions,
    )
