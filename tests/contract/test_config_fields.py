"""Documented fields of GRPOConfig, their defaults, and the test that shows the effect of each."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from groupgrad import GRPOConfig
from groupgrad.config import legacy

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("GROUPGRAD_SHARED", ROOT.parent / "shared"))

# Names and defaults of the documented signature of GRPOConfig, in its order.
DOCUMENTED: dict[str, Any] = {
    "output_dir": None,
    "overwrite_output_dir": False,
    "do_train": False,
    "do_eval": False,
    "do_predict": False,
    "eval_strategy": "no",
    "prediction_loss_only": False,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "per_gpu_train_batch_size": None,
    "per_gpu_eval_batch_size": None,
    "gradient_accumulation_steps": 1,
    "eval_accumulation_steps": None,
    "eval_delay": 0,
    "torch_empty_cache_steps": None,
    "learning_rate": 1e-06,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_ratio": 0.0,
    "warmup_steps": 0,
    "log_level": "passive",
    "log_level_replica": "warning",
    "log_on_each_node": True,
    "logging_dir": None,
    "logging_strategy": "steps",
    "logging_first_step": False,
    "logging_steps": 10,
    "logging_nan_inf_filter": True,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "save_safetensors": True,
    "save_on_each_node": False,
    "save_only_model": False,
    "restore_callback_states_from_checkpoint": False,
    "no_cuda": False,
    "use_cpu": False,
    "use_mps_device": False,
    "seed": 42,
    "data_seed": None,
    "jit_mode_eval": False,
    "bf16": None,
    "fp16": False,
    "fp16_opt_level": "O1",
    "half_precision_backend": "auto",
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "tf32": None,
    "local_rank": -1,
    "ddp_backend": None,
    "tpu_num_cores": None,
    "tpu_metrics_debug": False,
    "debug": "",
    "dataloader_drop_last": False,
    "eval_steps": None,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "past_index": -1,
    "run_name": None,
    "disable_tqdm": None,
    "remove_unused_columns": False,
    "label_names": None,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "ignore_data_skip": False,
    "fsdp": None,
    "fsdp_min_num_params": 0,
    "fsdp_config": None,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "accelerator_config": None,
    "parallelism_config": None,
    "deepspeed": None,
    "label_smoothing_factor": 0.0,
    "optim": "adamw_torch_fused",
    "optim_args": None,
    "adafactor": False,
    "group_by_length": False,
    "length_column_name": "length",
    "report_to": None,
    "project": "huggingface",
    "trackio_space_id": "trackio",
    "ddp_find_unused_parameters": None,
    "ddp_bucket_cap_mb": None,
    "ddp_broadcast_buffers": None,
    "dataloader_pin_memory": True,
    "dataloader_persistent_workers": False,
    "skip_memory_metrics": True,
    "use_legacy_prediction_loop": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
    "hub_model_id": None,
    "hub_strategy": "every_save",
    "hub_token": None,
    "hub_private_repo": None,
    "hub_always_push": False,
    "hub_revision": None,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": None,
    "include_inputs_for_metrics": False,
    "include_for_metrics": [],
    "eval_do_concat_batches": True,
    "fp16_backend": "auto",
    "push_to_hub_model_id": None,
    "push_to_hub_organization": None,
    "push_to_hub_token": None,
    "mp_parameters": "",
    "auto_find_batch_size": False,
    "full_determinism": False,
    "torchdynamo": None,
    "ray_scope": "last",
    "ddp_timeout": 1800,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "include_tokens_per_second": False,
    "include_num_input_tokens_seen": False,
    "neftune_noise_alpha": None,
    "optim_target_modules": None,
    "batch_eval_metrics": False,
    "eval_on_start": False,
    "use_liger_kernel": False,
    "liger_kernel_config": None,
    "eval_use_gather_object": False,
    "average_tokens_across_devices": True,
    "model_init_kwargs": None,
    "disable_dropout": False,
    "cast_lm_head_to_fp32": False,
    "num_generations": 8,
    "num_generations_eval": None,
    "max_completion_length": 256,
    "ds3_gather_for_generation": True,
    "shuffle_dataset": True,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "min_p": None,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "repetition_penalty": 1.0,
    "use_transformers_paged": False,
    "cache_implementation": None,
    "use_vllm": False,
    "vllm_mode": "server",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_guided_decoding_regex": None,
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "beta": 0.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "delta": None,
    "epsilon_high": None,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "importance_sampling_level": "token",
    "reward_weights": None,
    "scale_rewards": "group",
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "top_entropy_quantile": 1.0,
    "use_liger_loss": None,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_cap": 3.0,
    "use_bias_correction_kl": False,
    "log_completions": False,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
    "max_prompt_length": None,
    "wandb_log_unique_prompts": None,
}

# Defaults that differ from that signature, and why.
DIFFERENT: dict[str, tuple[Any, str]] = {
    "vllm_mode": ("colocate", "the later main page says so, and it has precedence"),
    "gradient_checkpointing": (None, "on wherever it was, but on a CPU only where memory needs it"),
    "report_to": ("none", "default of the TrainingArguments that the main page refers to"),
    "trackio_space_id": (None, "default of the installed TrainingArguments"),
    "include_num_input_tokens_seen": ("no", "another spelling of False in the installed TrainingArguments"),
}

# Fields added after that signature, with defaults that keep its behaviour.
LATER: dict[str, Any] = {
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "max_tokens_per_pass": None,
    "context_parallel_size": 1,
    "pad_to_multiple_of": None,
    "stochastic_rounding": False,
    "gradient_dtype": "auto",
    "shuffle_rows": "rows",
    "dynamic_sampling_rounds": 0,
    "balance_ranks": True,
    "save_in_background": False,
    "allow_partial_resume": False,
    "resume_learning_rate": False,
    "engine_kv_memory": None,
    "engine_pack_weights": False,
    "derived_settings": None,
    "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None,
    "max_tool_calling_iterations": None,
    "tool_timeout_s": 60.0,
    "tool_max_result_chars": 20_000,
    "tool_threads": 64,
    "reuse_environments": None,
    "vllm_structured_outputs_regex": None,
    "vllm_group_port": 51216,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "multi_objective_aggregation": "sum_then_normalize",
    "reward_model_init_kwargs": None,
    "reward_model_device": None,
    "reward_model_batch_tokens": 16_384,
    "reward_model_offload": False,
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "log_multimodal": True,
    "log_completions_hub_repo": None,
    # before that signature
    "vllm_max_model_len": None,
    "vllm_device": None,
    "vllm_dtype": None,
    "vllm_enable_prefix_caching": True,
    # groupgrad's own
    "rollout_engine": "auto",
    "vllm_lora_updates": "auto",
    "vllm_sleep_level": 2,
    "rollout_ahead": 0,
    "vllm_in_flight_updates": False,
    "image_root": None,
    "hang_timeout_s": 3600.0,
    "reward_timeout_s": None,
    "reward_workers": 0,
    "reward_worker_memory_gb": None,
    "reward_retries": 0,
    "reward_transient_errors": None,
    "on_reward_failure": "error",
    "rollouts_keep": "1GB",
    "record_gradient_share": False,
    "record_spans": False,
    "record_traces": False,
    "special_tokens_in_prompts": "auto",
    "special_tokens_in_completions": False,
}


def default_of(field: dataclasses.Field) -> Any:
    """Returns the default of a dataclass field, from its factory if it has one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


DEFAULTS = {field.name: default_of(field) for field in dataclasses.fields(GRPOConfig)}
BASE = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
CHANGED = {"learning_rate", "logging_steps", "gradient_checkpointing", "bf16", "remove_unused_columns", "hub_token"}
"""Fields of TrainingArguments whose defaults GRPOConfig changes."""
OWN = (set(DEFAULTS) - BASE - set(legacy.LEGACY)) | CHANGED


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_field_exists_with_its_default(name):
    expected = DIFFERENT[name][0] if name in DIFFERENT else DOCUMENTED[name]
    assert DEFAULTS[name] == expected
    assert type(DEFAULTS[name]) is type(expected)


def test_nothing_is_excused_that_does_not_differ():
    assert all(DOCUMENTED[name] != value for name, (value, _) in DIFFERENT.items())


def test_later_fields_exist_with_their_defaults_and_no_others():
    assert {name: DEFAULTS[name] for name in LATER} == LATER
    assert set(DEFAULTS) - set(DOCUMENTED) - BASE == set(LATER) - BASE


def test_the_documented_signature_is_the_one_pinned_here():
    pages = sorted((SHARED / "reference" / "seeds").glob("001_*.txt"))
    if not pages:
        pytest.skip(f"the documented signature is not in {SHARED}; set GROUPGRAD_SHARED to the folder that has it")
    line = next(line for line in pages[0].read_text().splitlines() if line.startswith("( output_dir"))
    entry = re.compile(r"\s*(\w+?): (.+?) = (None|True|False|'[^']*'|<factory>|-?\d+(?:\.\d+)?(?:e-?\d+)?)")
    documented, position = {}, 1
    while match := entry.match(line, position):
        name, _, text = match.groups()
        documented[name], position = [] if text == "<factory>" else ast.literal_eval(text), match.end()
    assert line[position:].strip() == ")"
    assert documented == DOCUMENTED
    assert list(documented) == list(DOCUMENTED)


def test_every_field_explains_itself():
    for field in dataclasses.fields(GRPOConfig):
        if field.name in OWN or field.name in legacy.LEGACY:
            text = field.metadata.get("help", "")
            assert len(text) > 15 and text.endswith("."), field.name
            assert set(field.metadata) == {"help"}, field.name


# --- The effect of each GRPO field ---


@dataclass(slots=True, frozen=True)
class Changes:
    """The field changes a run; the test `path::name` shows it."""

    test: str


@dataclass(slots=True, frozen=True)
class Warns:
    """The field has no effect without `needs`, and setting it to `value` warns."""

    value: Any
    needs: str


MOVES = Changes("tests/config/test_resolved.py::test_legacy_values_move_to_their_new_field")
RENAMED = Changes("tests/config/test_resolved.py::test_renamed_fields_warn_and_work")
WEIGHTS = Changes("tests/trainer/test_options.py::test_it_changes_the_weights")
LOSS = Changes("tests/trainer/test_objective.py::test_loss_and_gradient_of_two_steps")
CUT = Changes("tests/trainer/test_options.py::test_a_cut_to_the_likeliest_token_gives_a_group_one_text")
ADVANTAGES = Changes("tests/trainer/test_options.py::test_reward_weights_and_scaling")
GENERATION = Changes("tests/trainer/test_options.py::test_how_often_generation_batches_are_sampled")
INERT = "a meaning today"
SUPERVISED = "tests/trainer/test_reward_supervision.py"

AUDIT: dict[str, Changes | Warns] = {
    # defaults changed from TrainingArguments
    "learning_rate": WEIGHTS,
    "logging_steps": Changes("tests/trainer/test_options.py::test_logging_steps"),
    "gradient_checkpointing": Changes("tests/trainer/test_exactness.py::test_gradient_checkpointing_changes_nothing"),
    "bf16": Changes("tests/config/test_resolved.py::test_bf16_is_the_default_where_an_accelerator_has_it"),
    "remove_unused_columns": Changes(
        "tests/trainer/test_options.py::test_remove_unused_columns_hides_what_no_signature_names"
    ),
    "hub_token": Changes("tests/contract/test_hub.py::test_pushes_while_training"),
    "derived_settings": Changes("tests/config/test_copies.py::test_a_copy_says_which_settings_follow_again"),
    # model and reference
    "model_init_kwargs": Changes("tests/trainer/test_models.py::test_model_init_kwargs"),
    "trust_remote_code": Changes("tests/trainer/test_models.py::test_trust_remote_code"),
    "router_aux_loss_coef": Changes("tests/trainer/test_models.py::test_router_aux_loss_coef"),
    "disable_dropout": Changes("tests/trainer/test_models.py::test_disable_dropout_turns_all_of_it_off"),
    "cast_lm_head_to_fp32": Changes("tests/trainer/test_models.py::test_cast_lm_head_to_fp32"),
    "stochastic_rounding": Changes("tests/trainer/test_precision.py::test_small_updates_arrive"),
    "gradient_dtype": Changes("tests/trainer/test_precision.py::test_gradients_of_micro_batches_are_summed_in_float32"),
    "save_in_background": Changes("tests/faults/test_saves_behind.py::test_training_goes_on_while_a_file_is_written"),
    "allow_partial_resume": Changes(
        "tests/faults/test_resuming.py::test_allow_partial_resume_goes_on_and_says_what_is_new"
    ),
    "resume_learning_rate": Changes("tests/faults/test_resuming.py::test_changed_options_are_listed"),
    "beta": LOSS,
    "sync_ref_model": WEIGHTS,
    "ref_model_mixup_alpha": Changes("tests/trainer/test_models.py::test_the_reference_is_mixed"),
    "ref_model_sync_steps": Changes("tests/trainer/test_models.py::test_the_reference_follows_on_schedule"),
    # data and groups
    "num_generations": Changes("tests/trainer/test_options.py::test_num_generations_is_the_group_size"),
    "num_generations_eval": Changes("tests/trainer/test_evaluation.py::test_every_prompt_is_measured_once"),
    "max_completion_length": Changes("tests/trainer/test_options.py::test_max_completion_length"),
    "shuffle_dataset": Changes("tests/trainer/test_options.py::test_shuffle_dataset_off_keeps_the_order"),
    "shuffle_rows": WEIGHTS,
    "dynamic_sampling_rounds": Changes(
        "tests/trainer/test_dynamic_sampling.py::test_the_groups_that_train_have_a_signal"
    ),
    "balance_ranks": Changes("tests/trainer/test_processes.py::test_ranks_share_the_work_of_long_rows"),
    "max_tokens_per_pass": Changes("tests/trainer/test_long_rows.py::test_rows_of_a_group_are_cut_into_passes"),
    "context_parallel_size": Changes(
        "tests/trainer/test_context_parallel.py::test_two_processes_that_train_rows_together_equal_one"
    ),
    "pad_to_multiple_of": Warns(8, "padding"),
    "ds3_gather_for_generation": Warns(False, "DeepSpeed ZeRO-3"),
    # generation
    "rollout_engine": Changes("tests/trainer/test_options.py::test_rollout_engine"),
    "engine_kv_memory": Changes("tests/trainer/test_engines.py::test_engine_kv_memory_bounds_the_sampler"),
    "engine_pack_weights": Changes("tests/trainer/test_engines.py::test_packed_weights_are_the_present_ones"),
    "generation_batch_size": GENERATION,
    "steps_per_generation": GENERATION,
    "temperature": Changes("tests/trainer/test_options.py::test_the_temperature_divides_the_scores"),
    "top_p": CUT,
    "top_k": CUT,
    "min_p": CUT,
    "repetition_penalty": Changes("tests/trainer/test_options.py::test_a_repetition_penalty_keeps_tokens_apart"),
    "generation_kwargs": Changes("tests/trainer/test_options.py::test_generation_kwargs_go_to_the_sampler"),
    "chat_template_kwargs": Changes("tests/trainer/test_options.py::test_chat_template_kwargs_and_messages"),
    "special_tokens_in_prompts": Changes("tests/trainer/test_options.py::test_special_tokens_in_prompts"),
    "special_tokens_in_completions": Changes(
        "tests/trainer/test_think_rewards.py::test_think_tags_that_are_special_tokens"
    ),
    "hang_timeout_s": Changes("tests/trainer/test_hangs.py::test_what_hangs_ends_the_run_with_its_name"),
    "image_root": Changes("tests/trainer/test_vision.py::test_paths_stay_below_image_root"),
    "cache_implementation": Changes("tests/trainer/test_options.py::test_cache_implementation"),
    "use_transformers_continuous_batching": Changes(
        "tests/trainer/test_engines.py::test_paged_generation_samples_a_run"
    ),
    "transformers_continuous_batching_config": Warns({"a": 1}, "continuous batching"),
    "max_tool_calling_iterations": Changes("tests/contract/test_agents.py::test_tool_calling_iterations_have_a_limit"),
    "reuse_environments": Changes("tests/contract/test_environment_reuse.py::test_each_rollout_may_have_its_own"),
    "tool_timeout_s": Changes("tests/contract/test_agents.py::test_options_of_tools_reach_them"),
    "tool_max_result_chars": Changes("tests/contract/test_agents.py::test_options_of_tools_reach_them"),
    "tool_threads": Changes("tests/contract/test_agents.py::test_options_of_tools_reach_them"),
    # vLLM
    "use_vllm": Changes(
        "tests/trainer/test_vllm_policy.py::test_each_generation_batch_is_sampled_from_the_weights_of_its_step"
    ),
    "vllm_mode": Warns("server", "vLLM"),
    "vllm_model_impl": Warns("transformers", "vLLM"),
    "vllm_enable_sleep_mode": Warns(True, "vLLM"),
    "vllm_sleep_level": Warns(1, "vLLM"),
    "vllm_structured_outputs_regex": Warns("a+", "vLLM"),
    "vllm_server_base_url": Warns("http://x", "vLLM"),
    "vllm_server_host": Warns("127.0.0.1", "vLLM"),
    "vllm_server_port": Warns(8001, "vLLM"),
    "vllm_server_timeout": Warns(10.0, "vLLM"),
    "vllm_group_port": Warns(51217, "vLLM"),
    "vllm_gpu_memory_utilization": Warns(0.5, "vLLM"),
    "vllm_max_model_length": Warns(512, "vLLM"),
    "vllm_tensor_parallel_size": Warns(2, "vLLM"),
    "vllm_lora_updates": Warns("merge", "vLLM"),
    "rollout_ahead": Changes(
        "tests/trainer/test_vllm_policy.py::test_generation_batches_ahead_are_at_most_as_old_as_agreed_and_none_is_sampled_in_vain"
    ),
    "vllm_in_flight_updates": Changes(
        "tests/trainer/test_vllm_policy.py::test_rows_go_on_with_weights_that_are_sent_in_flight"
    ),
    "vllm_importance_sampling_correction": Warns(False, "vLLM"),
    "vllm_importance_sampling_mode": Warns("token_mask", "vLLM"),
    "vllm_importance_sampling_clip_max": Warns(2.0, "vLLM"),
    "vllm_importance_sampling_clip_min": Warns(0.1, "vLLM"),
    # objective
    "loss_type": LOSS,
    "importance_sampling_level": LOSS,
    "num_iterations": Changes("tests/trainer/test_options.py::test_how_often_generation_batches_are_sampled"),
    "epsilon": LOSS,
    "epsilon_high": LOSS,
    "delta": LOSS,
    "sapo_temperature_neg": LOSS,
    "sapo_temperature_pos": LOSS,
    "vespo_k_pos": LOSS,
    "vespo_lambda_pos": LOSS,
    "vespo_k_neg": LOSS,
    "vespo_lambda_neg": LOSS,
    "mask_truncated_completions": LOSS,
    "top_entropy_quantile": LOSS,
    "use_bias_correction_kl": LOSS,
    "off_policy_mask_threshold": LOSS,
    "entropy_coef": LOSS,
    "use_adaptive_entropy": WEIGHTS,
    "entropy_coef_min": Changes("tests/trainer/test_metrics.py::test_the_adaptive_coefficient_is_logged_and_moves"),
    "entropy_coef_max": WEIGHTS,
    "entropy_coef_delta": WEIGHTS,
    "entropy_target": WEIGHTS,
    # rewards
    "reward_weights": ADVANTAGES,
    "scale_rewards": ADVANTAGES,
    "multi_objective_aggregation": ADVANTAGES,
    "reward_timeout_s": Changes(f"{SUPERVISED}::test_a_late_reward_ends_the_run_before_the_watchdog"),
    "reward_workers": Changes(f"{SUPERVISED}::test_a_worker_trains_as_the_process_itself"),
    "reward_worker_memory_gb": Changes(f"{SUPERVISED}::test_options_reach_the_calls"),
    "reward_retries": Changes(f"{SUPERVISED}::test_options_reach_the_calls"),
    "reward_transient_errors": Changes(f"{SUPERVISED}::test_options_reach_the_calls"),
    "on_reward_failure": Changes(f"{SUPERVISED}::test_options_reach_the_calls"),
    "reward_model_init_kwargs": Changes("tests/trainer/test_reward_models.py::test_loading_options_are_separate"),
    "reward_model_device": Changes("tests/trainer/test_reward_models.py::test_options_reach_the_reward_models"),
    "reward_model_batch_tokens": Changes("tests/trainer/test_reward_models.py::test_options_reach_the_reward_models"),
    "reward_model_offload": Changes("tests/trainer/test_reward_models.py::test_options_reach_the_reward_models"),
    # logging
    "log_completions": Changes("tests/trainer/test_metrics.py::test_each_log_event_and_phase_has_a_file"),
    "log_multimodal": Warns(False, "log_completions is False"),
    "num_completions_to_print": Changes("tests/trainer/test_options.py::test_completions_are_printed"),
    "log_unique_prompts": Changes("tests/trainer/test_options.py::test_trackers_get_each_prompt_once_if_asked"),
    "log_completions_hub_repo": Changes("tests/contract/test_hub.py::test_completions_are_uploaded"),
    "rollouts_keep": Changes("tests/trainer/test_run_folder.py::test_rollouts_keep_bounds_the_folder_and_is_said_once"),
    "record_gradient_share": Changes("tests/trainer/test_gradient_share.py::test_shares_equal_a_pass_for_each_row"),
    "record_spans": Changes("tests/trainer/test_run_spans.py::test_steps_rollouts_and_events_are_spans"),
    "record_traces": Changes("tests/trainer/test_run_traces.py::test_rollouts_and_events_are_traces"),
    # fields of earlier releases that were replaced
    "per_gpu_train_batch_size": MOVES,
    "per_gpu_eval_batch_size": MOVES,
    "warmup_ratio": Changes("tests/config/test_resolved.py::test_warmup_ratio_is_a_share_of_the_steps"),
    "logging_dir": Changes("tests/config/test_resolved.py::test_logging_dir_is_where_tensorboard_looks"),
    "no_cuda": MOVES,
    "adafactor": MOVES,
    "push_to_hub_model_id": MOVES,
    "push_to_hub_organization": MOVES,
    "push_to_hub_token": MOVES,
    "torchdynamo": MOVES,
    "use_liger_loss": RENAMED,
    "wandb_log_unique_prompts": RENAMED,
    "vllm_guided_decoding_regex": RENAMED,
    "vllm_importance_sampling_cap": RENAMED,
    "vllm_max_model_len": RENAMED,
    "use_transformers_paged": Changes("tests/trainer/test_engines.py::test_paged_generation_samples_a_run"),
    # fields of earlier releases without effect
    "overwrite_output_dir": Warns(True, INERT),
    "save_safetensors": Warns(False, INERT),
    "use_mps_device": Warns(True, INERT),
    "jit_mode_eval": Warns(True, INERT),
    "fp16_opt_level": Warns("O2", INERT),
    "half_precision_backend": Warns("apex", INERT),
    "fp16_backend": Warns("apex", INERT),
    "tpu_num_cores": Warns(8, INERT),
    "tpu_metrics_debug": Warns(True, INERT),
    "past_index": Warns(1, INERT),
    "include_inputs_for_metrics": Warns(True, INERT),
    "fsdp_min_num_params": Warns(1, INERT),
    "fsdp_transformer_layer_cls_to_wrap": Warns("Block", INERT),
    "group_by_length": Warns(True, INERT),
    "use_legacy_prediction_loop": Warns(True, INERT),
    "mp_parameters": Warns("x", INERT),
    "ray_scope": Warns("all", INERT),
    "include_tokens_per_second": Warns(True, INERT),
    "max_prompt_length": Warns(512, INERT),
    "vllm_device": Warns("cuda:0", INERT),
    "vllm_dtype": Warns("auto", INERT),
    "vllm_enable_prefix_caching": Warns(False, INERT),
}

ROWS = {effect: [(name, row) for name, row in AUDIT.items() if isinstance(row, effect)] for effect in (Changes, Warns)}


def test_the_audit_covers_every_field_and_nothing_more():
    assert set(AUDIT) == OWN | set(legacy.LEGACY)


@pytest.mark.parametrize(("name", "row"), ROWS[Warns], ids=lambda v: v if isinstance(v, str) else "")
def test_a_field_without_effect_says_so(name, row):
    assert row.value != DEFAULTS[name]
    with pytest.warns(Warning, match=rf"no effect.*{name}="):
        GRPOConfig(use_cpu=True, **{name: row.value})


@pytest.mark.parametrize("test", sorted({row.test for _, row in ROWS[Changes]}))
def test_the_named_tests_exist(test):
    """The tests of `WEIGHTS` and `LOSS` also set each of their fields."""
    path, name = test.split("::")
    text = (ROOT / path).read_text()
    assert f"def {name}(" in text
    if test in (WEIGHTS.test, LOSS.test):
        assert [field for field, row in ROWS[Changes] if row.test == test and f'"{field}": ' not in text] == []
