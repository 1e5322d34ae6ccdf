"""Settings that do nothing: beside the others, or at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from groupgrad.config.launch import zero_stage

if TYPE_CHECKING:
    from groupgrad.config.grpo_config import GRPOConfig


@dataclass(slots=True, frozen=True)
class Idle:
    """Settings that mean nothing beside the others."""

    fields: tuple[str, ...]
    when: Callable[[GRPOConfig], bool]
    why: str


IDLE: tuple[Idle, ...] = (
    Idle(("sapo_temperature_neg", "sapo_temperature_pos"), lambda c: c.loss_type != "sapo", "loss_type is not 'sapo'"),
    Idle(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        lambda c: c.loss_type != "vespo",
        "loss_type is not 'vespo'",
    ),
    Idle(("delta",), lambda c: c.loss_type in ("cispo", "sapo", "vespo"), "this loss_type does not clip the ratio"),
    Idle(("epsilon",), lambda c: c.loss_type in ("cispo", "sapo", "vespo"), "this loss_type has no lower clip"),
    Idle(("epsilon_high",), lambda c: c.loss_type in ("sapo", "vespo"), "this loss_type has no upper clip"),
    Idle(("ref_model_mixup_alpha", "ref_model_sync_steps"), lambda c: not c.sync_ref_model, "sync_ref_model is False"),
    Idle(("use_bias_correction_kl",), lambda c: c.beta == 0, "beta is 0"),
    Idle(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        lambda c: not c.use_adaptive_entropy,
        "use_adaptive_entropy is False",
    ),
    Idle(
        ("scale_rewards",),
        lambda c: c.multi_objective_aggregation == "normalize_then_sum",
        "normalize_then_sum scales each reward in its group and the sum over the batch",
    ),
    Idle(
        ("num_completions_to_print", "log_unique_prompts"), lambda c: not c.log_completions, "log_completions is False"
    ),
    Idle(
        ("transformers_continuous_batching_config",),
        lambda c: not c.use_transformers_continuous_batching,
        "use_transformers_continuous_batching is False",
    ),
    Idle(("pad_to_multiple_of",), lambda c: True, "nothing is padded"),
    Idle(("log_multimodal",), lambda c: True, "there are no images in this version"),
    Idle(("ds3_gather_for_generation",), lambda c: zero_stage(c) != 3, "DeepSpeed ZeRO-3 is not in use"),
    Idle(
        (
            "vllm_mode",
            "vllm_model_impl",
            "vllm_enable_sleep_mode",
            "vllm_structured_outputs_regex",
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_group_port",
            "vllm_gpu_memory_utilization",
            "vllm_max_model_length",
            "vllm_tensor_parallel_size",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
        ),
        lambda c: not c.use_vllm,
        "use_vllm is False",
    ),
)
