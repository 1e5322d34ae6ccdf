"""The flat configuration cut into the small frozen options that each floor takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.batching.loader import LoaderOptions
from groupgrad.config.sampling import has_comparable_logprobs, mapping, temperature
from groupgrad.engines.selection import EngineOptions
from groupgrad.envs.tools import ToolOptions
from groupgrad.modeling.scoring.forward import ForwardOptions
from groupgrad.objectives import (
    Aggregation,
    LossType,
    MismatchMode,
    MismatchOptions,
    PolicyOptions,
    RatioLevel,
    ScaleRewards,
)
from groupgrad.rewards.model_loading import RewardModelOptions, hub_kwargs
from groupgrad.rollout.agent import AgentOptions
from groupgrad.rollout.collector import ScoringOptions

if TYPE_CHECKING:
    from groupgrad.config.grpo_config import GRPOConfig


def generation_plan(config: GRPOConfig) -> GenerationPlan:
    """The arithmetic of a generation round."""
    return GenerationPlan(
        micro_batch_rows=config.per_device_train_batch_size,
        world_size=config.world_size,
        accumulation=config.gradient_accumulation_steps,
        steps_per_generation=config.steps_per_generation_resolved,
        num_iterations=config.num_iterations,
        num_generations=cast(int, config.num_generations),
    )


def loader_options(config: GRPOConfig) -> LoaderOptions:
    """How the training data is read."""
    return LoaderOptions(
        shuffle=bool(config.shuffle_dataset),
        seed=config.seed if config.data_seed is None else config.data_seed,
        drop_last=config.dataloader_drop_last,
        num_workers=config.dataloader_num_workers,
        prefetch_factor=config.dataloader_prefetch_factor,
        persistent_workers=config.dataloader_persistent_workers,
        multiprocessing_context=getattr(config, "dataloader_multiprocessing_context", None),
        ahead=config.rollout_ahead,
    )


def agent_options(config: GRPOConfig) -> AgentOptions:
    """How agents call tools and environments."""
    return AgentOptions(
        max_tool_rounds=config.max_tool_calling_iterations,
        tools=ToolOptions(
            timeout_s=float(config.tool_timeout_s),
            max_result_chars=config.tool_max_result_chars,
            num_threads=config.tool_threads,
        ),
        ahead=config.rollout_ahead,
    )


def engine_options(config: GRPOConfig) -> EngineOptions:
    """Which engine samples, and its own settings."""
    return EngineOptions(
        engine=config.rollout_engine,
        kv_memory=config.engine_kv_memory_resolved,
        pack_weights=config.engine_pack_weights,
        max_rows=config.per_device_train_batch_size * config.gradient_accumulation_steps,
    )


def policy_options(config: GRPOConfig) -> PolicyOptions:
    """The objective. Sampler/trainer mismatch needs correction only with an engine of its own weights."""
    mismatch = None
    if config.use_vllm and config.vllm_importance_sampling_correction and has_comparable_logprobs(config):
        mismatch = MismatchOptions(
            mode=cast(MismatchMode, config.vllm_importance_sampling_mode),
            clip_min=config.vllm_importance_sampling_clip_min,
            clip_max=config.vllm_importance_sampling_clip_max,
        )
    return PolicyOptions(
        loss_type=cast(LossType, config.loss_type),
        importance_sampling_level=cast(RatioLevel, config.importance_sampling_level),
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high_resolved,
        delta=config.delta,
        beta=config.beta,
        use_bias_correction_kl=config.use_bias_correction_kl,
        max_completion_length=cast(int, config.max_completion_length),
        sapo_temperature_neg=config.sapo_temperature_neg,
        sapo_temperature_pos=config.sapo_temperature_pos,
        vespo_k_pos=config.vespo_k_pos,
        vespo_lambda_pos=config.vespo_lambda_pos,
        vespo_k_neg=config.vespo_k_neg,
        vespo_lambda_neg=config.vespo_lambda_neg,
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        top_entropy_quantile=config.top_entropy_quantile,
        mismatch=mismatch,
    )


def forward_options(config: GRPOConfig, *, pad_id: int, aux_loss: bool) -> ForwardOptions:
    """How completion tokens are scored."""
    return ForwardOptions(
        temperature=temperature(config),
        pad_id=pad_id,
        entropy_gradient=config.entropy_coef != 0.0 or config.use_adaptive_entropy,
        aux_loss=aux_loss,
    )


def reward_model_options(config: GRPOConfig) -> RewardModelOptions:
    """How reward models are loaded and run: fetched as the policy is, and otherwise by settings of their own."""
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


def scoring_options(config: GRPOConfig, num_rewards: int, num_own: int = 0) -> ScoringOptions:
    """How rewards become advantages, of `num_rewards` functions and `num_own` environments, which weigh 1 each.

    ValueError if there is not one weight a reward function.
    """
    weights = config.reward_weights
    if weights is not None and len(weights) != num_rewards:
        raise ValueError(
            f"reward_weights has {len(weights)} entries ({weights}), but there are {num_rewards} reward functions; "
            "give one weight for each"
        )
    return ScoringOptions(
        reward_weights=(*(float(w) for w in weights or (1.0,) * num_rewards), *(1.0,) * num_own),
        scale_rewards=cast(ScaleRewards, str(config.scale_rewards)),
        aggregation=cast(Aggregation, config.multi_objective_aggregation),
        mask_truncated=config.mask_truncated_completions,
        keep_records=config.log_completions,
        keep_images=config.log_multimodal and not {"wandb", "trackio", "all"}.isdisjoint(config.report_to or ()),
    )
