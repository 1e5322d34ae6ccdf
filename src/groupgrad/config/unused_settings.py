"""Settings that do nothing: beside the others, or at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from groupgrad.config.launcher import uses_deepspeed, zero_stage

if TYPE_CHECKING:
    from groupgrad.config.grpo_config import GRPOConfig


@dataclass(slots=True, frozen=True)
class UnusedSetting:
    """Settings that mean nothing beside the others."""

    fields: tuple[str, ...]
    when: Callable[[GRPOConfig], bool]
    why: str


UNUSED: tuple[UnusedSetting, ...] = (
    UnusedSetting(
        ("sapo_temperature_neg", "sapo_temperature_pos"), lambda c: c.loss_type != "sapo", "loss_type is not 'sapo'"
    ),
    UnusedSetting(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        lambda c: c.loss_type != "vespo",
        "loss_type is not 'vespo'",
    ),
    UnusedSetting(
        ("delta",), lambda c: c.loss_type in ("cispo", "sapo", "vespo"), "this loss_type does not clip the ratio"
    ),
    UnusedSetting(
        ("epsilon",), lambda c: c.loss_type in ("cispo", "sapo", "vespo"), "this loss_type has no lower clip"
    ),
    UnusedSetting(("epsilon_high",), lambda c: c.loss_type in ("sapo", "vespo"), "this loss_type has no upper clip"),
    UnusedSetting(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"), lambda c: not c.sync_ref_model, "sync_ref_model is False"
    ),
    UnusedSetting(("use_bias_correction_kl",), lambda c: c.beta == 0, "beta is 0"),
    UnusedSetting(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        lambda c: not c.use_adaptive_entropy,
        "use_adaptive_entropy is False",
    ),
    UnusedSetting(
        ("scale_rewards",),
        lambda c: c.multi_objective_aggregation == "normalize_then_sum",
        "normalize_then_sum scales each reward in its group and the sum over the batch",
    ),
    UnusedSetting(
        ("num_completions_to_print", "log_unique_prompts", "log_multimodal"),
        lambda c: not c.log_completions,
        "log_completions is False",
    ),
    UnusedSetting(
        ("transformers_continuous_batching_config",),
        lambda c: not c.use_transformers_continuous_batching,
        "use_transformers_continuous_batching is False",
    ),
    UnusedSetting(
        ("engine_kv_memory", "engine_pack_weights"),
        lambda c: c.rollout_engine == "transformers",
        "rollout_engine is 'transformers', and they are the native engine's",
    ),
    UnusedSetting(
        ("reward_model_offload",),
        lambda c: (c.reward_model_device or str(c.device)).startswith("cpu"),
        "reward models run on the CPU, in host memory",
    ),
    UnusedSetting(("pad_to_multiple_of",), lambda c: True, "nothing is padded"),
    UnusedSetting(("ds3_gather_for_generation",), lambda c: zero_stage(c) != 3, "DeepSpeed ZeRO-3 is not in use"),
    UnusedSetting(
        ("ds3_gather_for_generation",),
        lambda c: zero_stage(c) == 3 and c.use_vllm,
        "vLLM samples, which is given the weights part by part",
    ),
    UnusedSetting(
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
            "vllm_lora_updates",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
        ),
        lambda c: not c.use_vllm,
        "use_vllm is False",
    ),
    UnusedSetting(
        (
            "vllm_enable_sleep_mode",
            "vllm_gpu_memory_utilization",
            "vllm_max_model_length",
            "vllm_tensor_parallel_size",
            "vllm_model_impl",
        ),
        lambda c: c.use_vllm and c.vllm_mode == "server",
        "vllm_mode is 'server', whose settings are those of `groupgrad vllm-serve`",
    ),
    UnusedSetting(
        (
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_group_port",
        ),
        lambda c: c.use_vllm and c.vllm_mode == "colocate",
        "vllm_mode is 'colocate', so there is no server",
    ),
    UnusedSetting(
        ("vllm_server_host", "vllm_server_port"),
        lambda c: c.use_vllm and c.vllm_mode == "server" and c.vllm_server_base_url is not None,
        "vllm_server_base_url says where the server is",
    ),
    UnusedSetting(
        (
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
        ),
        lambda c: c.use_vllm and not c.vllm_importance_sampling_correction,
        "vllm_importance_sampling_correction is False",
    ),
    UnusedSetting(
        ("rollout_engine", "engine_kv_memory", "engine_pack_weights", "cache_implementation"),
        lambda c: c.use_vllm,
        "use_vllm is True",
    ),
    # --- fields of TrainingArguments ---
    UnusedSetting(
        (
            "prediction_loss_only",
            "eval_accumulation_steps",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "include_for_metrics",
            "batch_eval_metrics",
        ),
        lambda c: True,
        "evaluation samples and scores completions; there are no predictions to collect",
    ),
    UnusedSetting(("label_names",), lambda c: True, "GRPO has no labels"),
    UnusedSetting(("length_column_name",), lambda c: True, "nothing is grouped by length"),
    UnusedSetting(("average_tokens_across_devices",), lambda c: True, "the loss always counts over all processes"),
    UnusedSetting(("dataloader_in_order",), lambda c: True, "generation rounds are always read in order"),
    UnusedSetting(
        ("ddp_find_unused_parameters", "ddp_static_graph"),
        lambda c: True,
        "processes join their gradients when those of a step are complete, whichever parameters have one",
    ),
    UnusedSetting(("ddp_bucket_cap_mb", "ddp_broadcast_buffers"), uses_deepspeed, "DeepSpeed joins the gradients"),
    UnusedSetting(
        ("dataloader_persistent_workers", "dataloader_multiprocessing_context"),
        lambda c: c.dataloader_num_workers == 0,
        "dataloader_num_workers is 0",
    ),
    UnusedSetting(("liger_kernel_config",), lambda c: not c.use_liger_kernel, "use_liger_kernel is False"),
    UnusedSetting(("fsdp_config",), lambda c: not c.fsdp, "fsdp is not in use"),
    UnusedSetting(
        ("optim_target_modules",),
        lambda c: not _name(c.optim).startswith(("galore", "apollo")),
        "only the GaLore and APOLLO optimizers have target modules",
    ),
    UnusedSetting(
        ("optim_args",),
        lambda c: _name(c.optim) in ("adamw_torch", "adamw_torch_fused", "adafactor"),
        "this optimizer takes no further options",
    ),
    UnusedSetting(("run_name",), lambda c: not c.report_to, "report_to names no tracker"),
    UnusedSetting(
        ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        lambda c: "trackio" not in (c.report_to or ()),
        "report_to does not name trackio",
    ),
)
"""In the order in which a warning lists them. A field that the installed transformers lacks is passed over."""


def unused_settings(config: GRPOConfig) -> list[str]:
    """One text for each group of settings that were changed although they do nothing: their values, and why."""
    found = []
    for row in UNUSED:
        changed = [name for name in row.fields if _is_changed(config, name)]
        if changed and row.when(config):
            found.append(f"{', '.join(f'{name}={getattr(config, name)!r}' for name in changed)} ({row.why})")
    return found


def unused_reward_settings(config: GRPOConfig, *, models: bool, by_name: bool) -> str | None:
    """Which settings of reward models were changed although there are no such `models`, or none loaded `by_name`."""
    names = _REWARD_MODEL_FIELDS[:1] if models else _REWARD_MODEL_FIELDS
    changed = [name for name in names if _is_changed(config, name)]
    if by_name or not changed:
        return None
    which = "reward model is given by name" if models else "reward function is a reward model"
    return f"{', '.join(changed)} {'has' if len(changed) == 1 else 'have'} no effect: no {which}"


_REWARD_MODEL_FIELDS = (
    "reward_model_init_kwargs",
    "reward_model_device",
    "reward_model_batch_tokens",
    "reward_model_offload",
)


def _is_changed(config: GRPOConfig, name: str) -> bool:
    field = config.__dataclass_fields__.get(name)
    if field is None:
        return False
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return getattr(config, name) != default


def _name(value: object) -> str:
    return str(getattr(value, "value", value))
