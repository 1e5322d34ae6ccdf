"""Settings that have no effect given the other settings, or no effect at all.

A new option that works only together with others gets one row in `UNUSED`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from groupgrad.config.field_rules import changed
from groupgrad.config.launcher import uses_deepspeed, uses_fsdp, zero_stage
from groupgrad.config.settings import GRPOSettings, mapping
from groupgrad.objectives import ESTIMATORS, LOSSES, find_estimator, find_method


@dataclass(slots=True, frozen=True)
class UnusedSettings:
    """Settings that have no effect under a condition."""

    fields: tuple[str, ...]
    why: str
    when: Callable[[GRPOSettings], bool] | None = None
    """None: always."""


def _fields(prefix: str) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(GRPOSettings) if field.name.startswith(prefix))


_NEEDED: dict[str, tuple[str, ...]] = {
    "sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
    "use_adaptive_entropy": (*_fields("entropy_coef_"), "entropy_target"),
    "log_completions": (
        *("num_completions_to_print", "log_unique_prompts", "log_multimodal"),
        "log_completions_hub_repo",
    ),
    "use_transformers_continuous_batching": ("transformers_continuous_batching_config",),
    "use_vllm": _fields("vllm_"),
    "vllm_enable_sleep_mode": ("vllm_sleep_level",),
    "vllm_importance_sampling_correction": (
        *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    ),
    "beta": ("use_bias_correction_kl",),
    "off_policy_mask": ("off_policy_mask_settings",),
    "reward_workers": ("reward_worker_memory_gb",),
    "reward_retries": ("reward_transient_errors",),
}
"""Setting -> those that have no effect while it is off, unset or 0."""

_READ_BY = [
    (field, option, [repr(name) for name, definition in known.items() if field in definition.reads], find)
    for option, known, find in (
        ("loss_type", LOSSES, find_method),
        ("advantage_estimator", ESTIMATORS, find_estimator),
    )
    for field in sorted({field for definition in known.values() for field in definition.reads})
]
"""Setting that some losses or estimators alone read, the option that names them, these, and what finds them."""

UNUSED: tuple[UnusedSettings, ...] = (
    *(
        UnusedSettings(fields, f"{switch} is off", lambda c, switch=switch: not getattr(c, switch))
        for switch, fields in _NEEDED.items()
    ),
    # --- objective ---
    *(
        UnusedSettings(
            (field,),
            f"{option} is not {readers[0]}" if len(readers) == 1 else f"this {option} does not read it",
            lambda c, field=field, option=option, find=find: field not in find(getattr(c, option)).reads,
        )
        for field, option, readers, find in _READ_BY
    ),
    UnusedSettings(
        ("scale_rewards",),
        "normalize_then_sum scales each reward in its group and the sum over the batch",
        lambda c: c.multi_objective_aggregation == "normalize_then_sum",
    ),
    UnusedSettings(
        ("shuffle_rows",),
        "each generation batch serves one optimizer step, which takes all of its rows",
        lambda c: c.gradient_accumulation_steps % c.steps_per_generation_resolved == 0,
    ),
    # --- logs, sampling, rewards ---
    UnusedSettings(
        ("engine_kv_memory",),
        "it is the native engine's, and another samples",
        lambda c: (c.rollout_engine == "transformers" or c.use_transformers_continuous_batching) and not c.use_vllm,
    ),
    UnusedSettings(
        ("reward_model_offload",),
        "reward models run on the CPU, in host memory",
        lambda c: (c.reward_model_device or str(c.device)).startswith("cpu"),
    ),
    UnusedSettings(
        ("reward_model_device",),
        "reward_model_init_kwargs has a device_map",
        lambda c: mapping(c.reward_model_init_kwargs).get("device_map") is not None,
    ),
    UnusedSettings(("pad_to_multiple_of",), "nothing is padded"),
    UnusedSettings(("save_in_background",), "training waits until a checkpoint is written"),
    UnusedSettings(("engine_pack_weights",), "the compiled kernels read weights in place"),
    UnusedSettings(("ds3_gather_for_generation",), "DeepSpeed ZeRO-3 is not in use", lambda c: zero_stage(c) != 3),
    UnusedSettings(
        ("ds3_gather_for_generation",),
        "vLLM samples, and receives the weights part by part",
        lambda c: zero_stage(c) == 3 and c.use_vllm,
    ),
    # --- vLLM ---
    UnusedSettings(
        (
            *("vllm_enable_sleep_mode", "vllm_sleep_level", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
            *("vllm_tensor_parallel_size", "vllm_model_impl"),
        ),
        "vllm_mode is 'server', whose settings are those of `groupgrad vllm-serve`",
        lambda c: c.use_vllm and c.vllm_mode == "server",
    ),
    UnusedSettings(
        (*_fields("vllm_server_"), "vllm_group_port"),
        "vllm_mode is 'colocate', so there is no server",
        lambda c: c.use_vllm and c.vllm_mode == "colocate",
    ),
    UnusedSettings(
        ("vllm_server_host", "vllm_server_port"),
        "vllm_server_base_url is the server's address",
        lambda c: c.use_vllm and c.vllm_mode == "server" and c.vllm_server_base_url is not None,
    ),
    UnusedSettings(
        (
            *("rollout_engine", "engine_kv_memory", "cache_implementation"),
            *("use_transformers_continuous_batching", "transformers_continuous_batching_config"),
        ),
        "use_vllm is True",
        lambda c: c.use_vllm,
    ),
    # --- fields of TrainingArguments ---
    UnusedSettings(("fp16",), "a CPU computes in float32 or bfloat16", lambda c: c.fp16 and c.device.type == "cpu"),
    UnusedSettings(
        (
            *("prediction_loss_only", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"),
            *("include_for_metrics", "batch_eval_metrics", "label_names", "length_column_name", "use_cache"),
            *("average_tokens_across_devices", "dataloader_in_order", "ddp_find_unused_parameters", "ddp_static_graph"),
        ),
        "sampling, scoring and the average over processes have no such choice here",
    ),
    UnusedSettings(
        ("ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        "DeepSpeed or FSDP joins the gradients",
        lambda c: uses_deepspeed(c) or uses_fsdp(c),
    ),
    UnusedSettings(("fsdp_config",), "fsdp is not in use", lambda c: not c.fsdp),
)
"""In the order in which a warning lists them. Fields that the installed transformers lacks are skipped."""

_REWARD_MODEL_FIELDS = _fields("reward_model_")


def unused_settings(config: GRPOSettings) -> list[str]:
    """Describes settings that were changed although they have no effect: their values, and why."""
    texts = []
    for row in UNUSED:
        names = changed(config, row.fields)
        if names and (row.when is None or row.when(config)):
            texts.append(f"{', '.join(f'{name}={getattr(config, name)!r}' for name in names)} ({row.why})")
    return texts


def unused_reward_settings(config: GRPOSettings, *, models: bool, by_name: bool) -> str | None:
    """Describes reward model settings that were changed although there are no reward `models`, or none `by_name`."""
    names = changed(config, _REWARD_MODEL_FIELDS[:1] if models else _REWARD_MODEL_FIELDS)
    if by_name or not names:
        return None
    reason = "reward model is given by name" if models else "reward function is a reward model"
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: no {reason}"
