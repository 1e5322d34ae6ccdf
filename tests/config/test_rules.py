"""Configurations that cannot work are refused with the value seen and the field to set."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from groupgrad import GRPOConfig, compat
from groupgrad.config import rules
from groupgrad.config.field_rules import CHOICES, DICTS, RANGES, field_problem
from groupgrad.config.launcher import zero_stage
from groupgrad.config.sampling import sampling_options
from groupgrad.config.unused_settings import UNUSED
from groupgrad.errors import ConfigError
from groupgrad.spelling import nearest
from groupgrad.trainer import component_options

ZERO_3 = {"zero_optimization": {"stage": 3}}
PAGED = {"use_transformers_continuous_batching": True}
IN_FLIGHT = {"use_vllm": True, "vllm_mode": "server", "rollout_ahead": 2, "vllm_in_flight_updates": True}

# (settings, texts in the message: the value seen, and what to set)
BAD: list[tuple[dict, list[str]]] = [
    ({"loss_type": "dappo"}, ["loss_type='dappo'", "did you mean 'dapo'", "luspo"]),
    (
        {"loss_type": "ppo2_something"},
        ["loss_type='ppo2_something'", "Set it to one of bnpo", "path of a module of yours"],
    ),
    ({"scale_rewards": None}, ["scale_rewards=None", "group, batch, none"]),
    ({"advantage_estimator": "rlo"}, ["advantage_estimator='rlo'", "did you mean 'rloo'"]),
    ({"advantage_settings": "k"}, ["advantage_settings='k' is not a dict"]),
    ({"advantage_estimator": "rloo", "advantage_settings": {"k": 4}}, ["advantage_settings has 'k', but this"]),
    (
        {"advantage_estimator": "pass_at_k", "advantage_settings": {"k": 9}},
        ["needs groups of 9, but num_generations is 8. Set num_generations to 9"],
    ),
    ({"loss_type": "dppo_tv", "loss_settings": '{"threshold": -1}'}, ["loss_settings has threshold=-1"]),
    ({"off_policy_mask": "m2p"}, ["off_policy_mask='m2p' is not known: did you mean 'm2po'"]),
    ({"off_policy_mask": "m2po", "off_policy_mask_settings": {"tau": -1}}, ["off_policy_mask_settings has tau=-1"]),
    ({"accelerator_config": {"split_batchez": True}}, ["unexpected keyword argument 'split_batchez'"]),
    ({"on_reward_failure": "ignore"}, ["on_reward_failure='ignore' is not known", "'error', 'none' or a reward"]),
    ({"on_reward_failure": {"f": "nan"}}, ["on_reward_failure={'f': 'nan'} is not known", "'none' or a reward"]),
    ({"on_reward_failure": True}, ["on_reward_failure=True is not known"]),
    ({"reward_timeout_s": 3600}, ["reward_timeout_s=3600 let", "hang_timeout_s=3600", "Raise hang_timeout_s"]),
    ({"reward_timeout_s": 1000, "reward_retries": 3}, ["reward_timeout_s=1000 and reward_retries=3"]),
    ({"epsilon": 1.0}, ["epsilon=1.0", "below 1"]),
    ({"chat_template_kwargs": {"tokenize": False}}, ["tokenize=False", "Take it out"]),
    ({"generation_kwargs": {"max_seq_length": 9}}, ["generation_kwargs has 'max_seq_length'", "which neither"]),
    ({"generation_kwargs": {"repetiton_penalty": 1.1}}, ["'repetiton_penalty' (did you mean 'repetition_penalty'?)"]),
    ({"generation_kwargs": {"do_sample": False}}, ["do_sample=False", "set a low temperature"]),
    ({"log_completions": "perhaps"}, ["log_completions='perhaps' is a text", "True or False"]),
    ({"gradient_checkpointing_kwargs": "abc"}, ["'abc' is not a dict"]),
    ({"max_steps": "many"}, ["max_steps='many'", "a whole number"]),
    ({"delta": 1.0}, ["delta=1.0", "above 1 + epsilon"]),
    ({"temperature": 0.0}, ["temperature=0.0", "above 0"]),
    ({"temperature": "hot"}, ["temperature='hot'", "a number above 0"]),
    ({"top_p": 0.0}, ["top_p=0.0", "at most 1"]),
    ({"top_p": 1.5}, ["top_p=1.5", "at most 1"]),
    ({"num_generations": 1}, ["num_generations=1 ", "at least 2"]),
    ({"max_completion_length": 2.5}, ["max_completion_length=2.5", "whole number"]),
    ({"context_parallel_size": 2}, ["context_parallel_size=2", "the run has 1", "--num-processes 2"]),
    (
        {"generation_batch_size": 16, "steps_per_generation": 2},
        ["generation_batch_size=16", "steps_per_generation=2", "Set one of them to None"],
    ),
    (
        {"num_generations": 6, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
        ["num_generations=6", "so a group would be cut. Set per_device_train_batch_size, ", "to a multiple of 6"],
    ),
    (
        {"num_generations": 6},
        ["num_generations=6", "num_generations to a divisor of 8", "gradient_accumulation_steps) to a multiple of 3"],
    ),
    ({"generation_batch_size": 20}, ["generation_batch_size=20", "Set it to a multiple of 8"]),
    (
        {"eval_strategy": "steps", "per_device_eval_batch_size": 3},
        ["per_device_eval_batch_size=3", "to a multiple of 8", "num_generations_eval to a divisor of 3"],
    ),
    ({"eval_on_start": True, "num_generations_eval": 3}, ["groups of 3", "eval_batch_size to a multiple of 3"]),
    ({"eval_sampling": 0.5}, ["eval_sampling=0.5 is not a dict"]),
    ({"eval_sampling": {"temprature": 0.5}}, ["eval_sampling has 'temprature'", "did you mean 'temperature'"]),
    ({"eval_sampling": {"repetition_penalty": 2.0}}, ["eval_sampling has 'repetition_penalty'", "Take it out"]),
    ({"eval_sampling": {"temperature": 0}}, ["in eval_sampling, temperature=0 cannot work", "0.01 is nearly greedy"]),
    ({"eval_sampling": {"max_completion_length": None}}, ["in eval_sampling, max_completion_length=None"]),
    ({"eval_sampling": {"num_generations": 0}}, ["in eval_sampling, num_generations=0", "at least 1"]),
    ({"num_train_epochs": 0}, ["num_train_epochs=0", "max_steps=-1", "Set one of them above 0"]),
    ({"generation_kwargs": {"min_new_tokens": 999}}, ["min_new_tokens=999, above max_completion_length=256"]),
    ({"engine_kv_memory": "0"}, ["engine_kv_memory='0' is no amount of bytes"]),
    ({"save_steps": 0}, ["save_steps=0", "save_strategy='no'"]),
    ({"eval_strategy": "steps", "eval_steps": -1}, ["eval_steps=-1", "eval_strategy='no'"]),
    ({"save_strategy": "best"}, ["save_strategy='best' with eval_strategy='no'", "metric_for_best_model='reward'"]),
    ({"reward_weights": [1.0, float("inf")]}, ["reward_weights=[1.0, inf]", "finite"]),
    (
        {"vllm_importance_sampling_clip_min": 4.0, "vllm_importance_sampling_clip_max": 3.0, "use_vllm": True},
        ["vllm_importance_sampling_clip_min=4.0", "below vllm_importance_sampling_clip_max=3.0"],
    ),
    (
        {"eval_sampling": {"num_generations": 4}, "num_generations_eval": 8},
        ["num_generations_eval=8, and eval_sampling has num_generations=4"],
    ),
    (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
        ["num_steps=2", "set gradient_accumulation_steps"],
    ),
    (
        {"eval_sampling": {"num_generations": 3}, "eval_strategy": "steps"},
        ["groups of 3", "per_device_eval_batch_size to a multiple of 3"],
    ),
    ({"eval_k": [1, 0]}, ["eval_k=[1, 0]", "at least 1"]),
    ({"eval_k": ["8"]}, ["eval_k=['8']", "whole numbers"]),
    ({"eval_k": [1, 16]}, ["eval_k has 16", "samples 8 completions", "Set num_generations_eval to 16 or more"]),
    ({"top_entropy_quantile": 3.0}, ["top_entropy_quantile=3.0", "from 0 to 1"]),
    ({"sync_ref_model": True}, ["sync_ref_model=True", "beta=0.0", "Set beta above 0"]),
    ({"use_adaptive_entropy": True, "entropy_coef": 2.0}, ["entropy_coef=2.0", "0.0 to 1.0"]),
    ({"rollouts_keep": "much"}, ["rollouts_keep='much' is no amount of bytes", "'4GiB'"]),
    ({"max_grad_norm": None}, ["max_grad_norm=None", "0 or more"]),
    ({"generation_kwargs": "{bad"}, ["generation_kwargs='{bad'", "JSON text"]),
    ({"chat_template_kwargs": "[1]"}, ["chat_template_kwargs='[1]'", "JSON text"]),
    ({"generation_kwargs": {"max_length": 9}}, ["max_length=9", "set max_completion_length"]),
    ({"generation_kwargs": {"num_return_sequences": 2}}, ["num_return_sequences=2", "set num_generations"]),
    ({"generation_kwargs": {"temperature": 0}}, ["in generation_kwargs, temperature=0", "above 0"]),
    ({"generation_kwargs": {"max_new_tokens": 0}}, ["in generation_kwargs, max_new_tokens=0"]),
    ({"use_vllm": True, "generation_kwargs": {"n": 2}}, ["generation_kwargs has 'n'", "sets for each row"]),
    ({"stochastic_rounding": True, "optim": "sgd"}, ["stochastic_rounding=True", "optim='sgd'", "adamw_torch"]),
    ({"stochastic_rounding": True, "optim_args": "a=1"}, ["stochastic_rounding=True", "optim_args='a=1'"]),
    ({"rollout_ahead": 1}, ["rollout_ahead=1", "use_vllm=False", "vllm_mode='server'"]),
    ({"rollout_ahead": 1, "use_vllm": True}, ["rollout_ahead=1", "vllm_mode='colocate'"]),
    (
        {"vllm_in_flight_updates": True},
        ["vllm_in_flight_updates=True", "with use_vllm=False", "rollout_ahead=2 or more"],
    ),
    ({**IN_FLIGHT, "rollout_ahead": 1}, ["with rollout_ahead=1 nothing samples"]),
    ({**IN_FLIGHT, "vllm_lora_updates": "adapter"}, ["vllm_lora_updates='adapter'", "'merge' or 'auto'"]),
    ({**PAGED, "rollout_engine": "native"}, ["use_transformers_continuous_batching=True", "rollout_engine='native'"]),
    ({**PAGED, "repetition_penalty": 1.2}, ["samples without repetition_penalty=1.2", "Take that out"]),
    ({**PAGED, "cache_implementation": "static"}, ["samples without cache_implementation='static'", "Take that out"]),
    ({**PAGED, "generation_kwargs": {"num_beams": 2}}, ["samples without num_beams=2", "Take that out"]),
    ({**PAGED, "deepspeed": ZERO_3}, ["use_transformers_continuous_batching=True", "ZeRO-3", "Set that to False"]),
    (
        {"deepspeed": ZERO_3, "ds3_gather_for_generation": False},
        ["ds3_gather_for_generation=False", "use_vllm to True"],
    ),
    ({"deepspeed": ZERO_3, "cast_lm_head_to_fp32": True}, ["cast_lm_head_to_fp32=True", "Set that to False"]),
    ({"deepspeed": ZERO_3, "beta": 0.1, "sync_ref_model": True}, ["sync_ref_model=True", "ZeRO stage 1 or 2"]),
    (
        {"loss_type": "vespo", "use_vllm": True},
        ["loss_type='vespo'", "vllm_importance_sampling_mode='sequence_mask'", "token_truncate"],
    ),
    ({"eval_strategy": "sometimes"}, ["sometimes is not a valid IntervalStrategy", "'no', 'steps', 'epoch'"]),
    ({"fp16": True, "bf16": True}, ["fp16 and bf16"]),
    ({"learning_rate": float("inf")}, ["learning_rate=inf", "no finite number", "0 or more"]),
    ({"load_best_model_at_end": True}, ["--load_best_model_at_end requires the save and eval strategy to match"]),
    (
        {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "epoch"},
        ["--load_best_model_at_end requires the save and eval strategy to match"],
    ),
]


@pytest.mark.parametrize(("settings", "texts"), BAD, ids=[str(settings)[:60] for settings, _ in BAD])
def test_a_bad_setting_is_named_with_what_to_set(settings, texts):
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(use_cpu=True, **settings)
    for text in texts:
        assert text in str(caught.value)


def test_every_range_and_choice_is_checked():
    for name, (allowed, why) in RANGES.items():
        for value in ("x", float("nan"), *([] if allowed.optional else [None])):
            assert str(field_problem(name, value)).endswith(f"it is no finite number. Set it to {allowed.remedy}")
        if not allowed.contains(-2):
            assert field_problem(name, -2) == f"{name}=-2 cannot work: {why}. Set it to {allowed.remedy}"
    for name, choices in CHOICES.items():
        text = str(field_problem(name, f"{choices[0]}x"))
        assert f"did you mean {choices[0]!r}" in text and ", ".join(choices) in text


@pytest.mark.parametrize(
    ("settings", "corrects"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"top_p": 0.9}, True),
        ({"top_p": 0.9, "temperature": 0.7}, False),
        ({"vllm_structured_outputs_regex": "a+"}, False),
        ({"vllm_importance_sampling_correction": False}, False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is not corrected for")
def test_only_log_probs_of_one_distribution_are_compared(settings, corrects):
    config = GRPOConfig(use_cpu=True, use_vllm=True, **settings)
    assert (component_options.policy_options(config).mismatch is not None) is corrects


def test_bf16_works_on_a_cpu_and_is_refused_on_an_accelerator_without_it(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert GRPOConfig(bf16=True).use_cpu
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    with pytest.raises(ConfigError, match=r"support bf16/gpu\. You need to assign use_cpu") as caught:
        GRPOConfig(bf16=True)
    assert len(caught.value.problems) == 1


def test_what_the_base_class_finds_too_is_one_problem():
    for settings in (
        {"load_best_model_at_end": True}, {"ddp_backend": "ncclx"}, {"fsdp": "full_shard"}
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            GRPOConfig(use_cpu=True, **{"save_strategy": "steps", **settings})
        assert len(caught.value.problems) == 1


def test_deepspeed_without_its_package_is_an_error_that_says_what_to_install(monkeypatch):
    if compat.is_available("deepspeed"):
        pytest.skip("deepspeed is installed")
    with pytest.raises(ImportError, match=r"deepspeed=.*pip install .deepspeed>="):
        GRPOConfig(use_cpu=True, deepspeed=ZERO_3)


def test_all_broken_rules_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(use_cpu=True, temperature=0, loss_type="dappo", epsilon=-1, eval_strategy="sometimes")
    assert len(caught.value.problems) == 4
    assert str(caught.value).startswith("4 settings cannot work:\n  1. ")


def test_the_tables_name_existing_fields_and_their_defaults_pass():
    config = GRPOConfig(use_cpu=True)
    for name in [*RANGES, *CHOICES, *DICTS, *(name for row in UNUSED for name in row.fields)]:
        assert hasattr(config, name), name
    assert rules.problems(config) == []
    assert rules.warnings_for(config) == []


# The numbers that the message proposes are parsed and tried.
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("group", [2, 7])
@pytest.mark.parametrize("accumulation", [1, 5])
def test_proposed_batch_settings_work(batch, group, accumulation):
    settings = {
        "use_cpu": True,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "num_generations": group,
    }
    if batch * accumulation % group == 0:
        assert GRPOConfig(**settings).generation_batch_size_resolved == batch * accumulation
        return
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**settings)
    text = str(caught.value)
    steps = int(re.search(r"gradient_accumulation_steps\) to a multiple of (\d+)", text)[1])
    for value in (steps, 2 * steps):
        GRPOConfig(**{**settings, "steps_per_generation": value})


def test_processes_count_in_the_arithmetic(monkeypatch):
    monkeypatch.setattr(GRPOConfig, "world_size", 3)
    config = GRPOConfig(use_cpu=True, per_device_train_batch_size=2, steps_per_generation=4, num_generations=8)
    assert (config.generation_batch_size_resolved, config.steps_per_generation_resolved) == (24, 4)
    config = GRPOConfig(use_cpu=True, per_device_train_batch_size=2, generation_batch_size=30, num_generations=5)
    assert (config.generation_batch_size_resolved, config.steps_per_generation_resolved) == (30, 5)
    with pytest.raises(ConfigError, match="Set it to a multiple of 6"):
        GRPOConfig(use_cpu=True, per_device_train_batch_size=2, generation_batch_size=28, num_generations=2)


@pytest.mark.parametrize("optim", ["adalomo", "lomo"])
def test_several_processes_refuse_updates_in_the_backward_pass(monkeypatch, optim):
    GRPOConfig(use_cpu=True, optim=optim)
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    with pytest.raises(ConfigError, match=f"optim='{optim}' changes weights .*2 processes.* Set optim='adamw_torch'"):
        GRPOConfig(use_cpu=True, optim=optim)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"context_parallel_size": 3}, "and the run has 4. Set it to a divisor of 4"),
        ({"context_parallel_size": 2, "fsdp": True}, "fsdp (leave it unset)"),
        ({"context_parallel_size": 2, "deepspeed": {"zero_optimization": {"stage": 2}}}, "deepspeed (leave it unset)"),
        ({"context_parallel_size": 2, "torch_compile": True}, "torch_compile=True (set it to False)"),
    ],
)
def test_processes_that_train_rows_together_exclude(monkeypatch, settings, text):
    monkeypatch.setattr(GRPOConfig, "world_size", 4)
    GRPOConfig(use_cpu=True, context_parallel_size=2)
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        GRPOConfig(use_cpu=True, **settings)
    assert f"context_parallel_size={settings['context_parallel_size']}" in str(caught.value)


def test_ddp_settings_are_unused_under_deepspeed():
    config = GRPOConfig(use_cpu=True, ddp_bucket_cap_mb=7, ddp_broadcast_buffers=False)
    assert rules.warnings_for(config) == []
    config.deepspeed = ZERO_3
    (text,) = rules.warnings_for(config)
    assert "ddp_bucket_cap_mb=7, ddp_broadcast_buffers=False (DeepSpeed or FSDP joins the gradients)" in text


def test_evaluation_arithmetic_is_only_checked_when_the_run_evaluates():
    GRPOConfig(use_cpu=True, per_device_eval_batch_size=3)
    GRPOConfig(use_cpu=True, per_device_eval_batch_size=3, num_generations_eval=1, eval_strategy="steps")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stage_is_read_from_dict_file_and_launcher(stage, tmp_path, monkeypatch):
    config = GRPOConfig(use_cpu=True)
    config.deepspeed = {"zero_optimization": {"stage": stage}}
    assert zero_stage(config) == stage
    path = tmp_path / "ds.json"
    path.write_text(f'{{"zero_optimization": {{"stage": {stage}}}}}')
    config.deepspeed = str(path)
    assert zero_stage(config) == stage
    config.deepspeed = None
    assert zero_stage(config) is None
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))
    assert zero_stage(config) == stage
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    assert zero_stage(config) == stage


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"loss_type": "cispo"}, "uses 5.0 as the ceiling"),
        ({"loss_type": "luspo"}, "importance_sampling_level='sequence'"),
        (
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
            "is defined for importance_sampling_level='token'",
        ),
        ({"loss_type": "dppo_kl", "importance_sampling_level": "sequence"}, "loss_type='dppo_kl' is defined for"),
        ({"vllm_mode": "server"}, r"vllm_mode='server' \(use_vllm is off\)"),
        ({"use_vllm": True, "top_p": 0.9, "temperature": 0.7}, "top_p=0.9 beside temperature=0.7 .* is not corrected"),
        ({"use_vllm": True, "temperature": 0.7, "generation_kwargs": {"min_tokens": 2}}, "^min_tokens=2 beside temp"),
        ({"use_vllm": True, "vllm_structured_outputs_regex": "a+"}, "'a[+]'.* without a structure it is"),
        ({"use_vllm": True, "vllm_server_port": 8001}, "'colocate', so there is no server"),
        (
            {
                "use_vllm": True,
                "vllm_mode": "server",
                "vllm_server_port": 8001,
                "vllm_server_base_url": "http://a:1",
            },
            "is the server's address",
        ),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True}, "groupgrad vllm-serve"),
        ({"use_vllm": True, "vllm_sleep_level": 1}, "vllm_sleep_level=1 .*vllm_enable_sleep_mode is off"),
        ({"use_vllm": True, "rollout_engine": "native"}, "use_vllm is True"),
        ({"sapo_temperature_neg": 2.0}, "loss_type is not 'sapo'"),
        ({"loss_type": "sapo", "delta": 1.5}, "delta=1.5"),
        ({"use_bias_correction_kl": True}, "beta is off"),
        ({"entropy_target": 0.5}, "use_adaptive_entropy is off"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
            r"load_best_model_at_end=True chooses by the loss .*\(metric_for_best_model='loss', the default\)",
        ),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            "lr_scheduler_type='reduce_lr_on_plateau' chooses by the loss .* Set metric_for_best_model='reward'",
        ),
        ({"num_completions_to_print": 3, "log_completions_hub_repo": "me/x"}, "log_completions is off"),
        ({"pad_to_multiple_of": 8}, "nothing is padded"),
        ({"off_policy_mask_settings": {"tau": 1.0}}, "off_policy_mask is off"),
        ({"advantage_estimator": "rloo", "scale_rewards": "none"}, r"'none' \(this advantage_estimator does not read"),
        ({"shuffle_rows": "groups"}, "serves one optimizer step"),
        ({"optim": "adamw_torch_8bit"}, "adam_epsilon=1e-08: second moments"),
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": False}, "scale_rewards='none'"),
    ],
)
def test_a_surprising_config_gives_one_warning(settings, text):
    with pytest.warns(UserWarning, match=text) as caught:
        GRPOConfig(use_cpu=True, **settings)
    assert len([w for w in caught if w.category is UserWarning]) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_type": "cispo", "epsilon_high": 4.0},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
        {"beta": 0.1, "use_bias_correction_kl": True, "sync_ref_model": True, "ref_model_sync_steps": 3},
        {"log_completions": True, "num_completions_to_print": 3},
        {"loss_type": "dppo_tv", "use_vllm": True},  # it weighs by the ratio to the sampler, without a correction
    ],
)
def test_ordinary_configs_are_silent(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GRPOConfig(use_cpu=True, **settings)


def test_nearest():
    assert nearest("DAPO", CHOICES["loss_type"]) == "dapo"
    assert nearest("xyz", CHOICES["loss_type"]) is None
    assert nearest("qwen3_0.6b", ["Qwen3-0.6B", "README"]) == "Qwen3-0.6B"


def test_numbers_and_switches_as_text(tmp_path):
    texts = {"learning_rate": "1e-6", "max_steps": "5", "num_generations": "4", "beta": "0.1", "save_steps": "0.5"}
    texts |= {"log_completions": "no", "mask_truncated_completions": "Yes", "shuffle_dataset": "false"}
    texts |= {"gradient_checkpointing": "off", "epsilon_high": "none"}
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16="no", report_to="none", **texts)
    assert (config.learning_rate, config.max_steps, config.num_generations) == (1e-6, 5, 4)
    assert (config.beta, config.save_steps, config.epsilon_high) == (0.1, 0.5, None)
    assert isinstance(config.max_steps, int)
    assert (config.log_completions, config.mask_truncated_completions, config.shuffle_dataset) == (False, True, False)
    assert (config.bf16, config.gradient_checkpointing) == (False, False)


def test_do_sample_may_be_named():
    config = GRPOConfig("out", use_cpu=True, bf16=False, generation_kwargs={"do_sample": True, "top_k": 3})
    options = sampling_options(config, eos_ids=[1], pad_id=0)
    assert (options.top_k, options.extra) == (3, {})
