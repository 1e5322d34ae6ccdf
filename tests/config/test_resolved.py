"""Derived values, alternative spellings of values, and fields of earlier releases."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

from groupgrad import GRPOConfig, compat
from groupgrad.config import legacy
from groupgrad.errors import ConfigError


def make(**settings) -> GRPOConfig:
    return GRPOConfig(**{"use_cpu": True, **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.2),
        ({"epsilon": 0.3}, 0.3),
        ({"epsilon_high": 0.28}, 0.28),
        ({"loss_type": "cispo", "epsilon_high": 4.0}, 4.0),
    ],
)
def test_epsilon_high(settings, expected):
    assert make(**settings).epsilon_high_resolved == expected


def test_cispo_warns_of_its_default_ceiling():
    with pytest.warns(UserWarning, match="uses 5.0 as the ceiling"):
        config = make(loss_type="cispo")
    assert config.epsilon_high is None
    assert config.epsilon_high_resolved == 5.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, "group"), (False, "none"), ("True", "group"), ("false", "none"), ("group", "group"), ("batch", "batch")],
)
def test_scale_rewards_spellings(value, expected):
    assert make(scale_rewards=value).scale_rewards == expected


@pytest.mark.filterwarnings("ignore")
def test_dicts_as_json():
    names = ("model_init_kwargs", "reward_model_init_kwargs", "generation_kwargs", "chat_template_kwargs")
    for name in (*names, "transformers_continuous_batching_config"):
        text = '{"cache_config": {"b": "1"}, "use_cache": true}'
        assert getattr(make(**{name: text}), name) == {"cache_config": {"b": "1"}, "use_cache": True}


@pytest.mark.parametrize(
    ("settings", "steps", "size"),
    [({}, 3, 24), ({"steps_per_generation": 5}, 5, 40), ({"generation_batch_size": 16}, 2, 16)],
)
def test_generation_batch_sizes(settings, steps, size):
    config = make(gradient_accumulation_steps=3, **settings)
    assert (config.steps_per_generation_resolved, config.generation_batch_size_resolved) == (steps, size)
    assert config.num_generations_eval_resolved == 8
    assert make(num_generations_eval=2).num_generations_eval_resolved == 2
    assert make(eval_sampling='{"num_generations": 4}').num_generations_eval_resolved == 4
    assert make(eval_sampling={"temperature": 0.5}, num_generations_eval=2).num_generations_eval_resolved == 2


def test_generation_kwargs_override_the_named_fields():
    config = make(top_k=5, generation_kwargs={"temperature": 0.7, "top_p": 0.9, "suppress_tokens": [3]})
    assert config.sampling_resolved == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": None,
        "repetition_penalty": 1.0,
    }
    assert config.temperature_resolved == 0.7
    assert config.generation_kwargs_resolved == {"suppress_tokens": [3]}
    assert make(top_k=0).sampling_resolved["top_k"] is None


@pytest.mark.parametrize(
    ("accelerator", "settings", "expected"),
    [
        (True, {"use_cpu": False}, True),
        (True, {"use_cpu": False, "fp16": True}, False),
        (True, {"use_cpu": False, "bf16": False}, False),
        (True, {"use_cpu": True}, False),
        (False, {"use_cpu": False}, False),
        (False, {"use_cpu": True, "bf16": True}, True),
    ],
)
def test_bf16_is_the_default_where_an_accelerator_has_it(accelerator, settings, expected, monkeypatch):
    monkeypatch.setattr(compat, "has_bf16_accelerator", lambda: accelerator)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: accelerator)
    config = GRPOConfig(**settings)
    assert config.bf16 is expected
    assert config.mixed_precision == ("bf16" if expected else "fp16" if config.fp16 else "no")


def test_a_config_without_arguments_works_on_this_machine():
    assert GRPOConfig().generation_batch_size_resolved % 8 == 0


# --- Fields of earlier releases ---


MOVED: list[tuple[dict[str, Any], str, Any]] = [
    ({"warmup_ratio": 0.1}, "warmup_steps", 0.1),
    ({"warmup_ratio": 0.1, "warmup_steps": 0.3}, "warmup_steps", 0.1),
    ({"per_gpu_train_batch_size": 16}, "per_device_train_batch_size", 16),
    ({"per_gpu_eval_batch_size": 16}, "per_device_eval_batch_size", 16),
    ({"no_cuda": True, "use_cpu": False}, "use_cpu", True),
    ({"adafactor": True}, "optim", "adafactor"),
    ({"push_to_hub_model_id": "m"}, "hub_model_id", "m"),
    ({"push_to_hub_model_id": "m", "push_to_hub_organization": "o"}, "hub_model_id", "o/m"),
    ({"push_to_hub_organization": "o", "output_dir": "runs/name/"}, "hub_model_id", "o/name"),
    ({"push_to_hub_token": "t"}, "hub_token", "t"),
    ({"torchdynamo": "eager"}, "torch_compile_backend", "eager"),
]
RENAMED: list[tuple[dict[str, Any], str, Any]] = [
    ({"use_liger_loss": True}, "use_liger_kernel", True),
    ({"use_liger_loss": False}, "use_liger_kernel", False),
    ({"wandb_log_unique_prompts": True, "log_completions": True}, "log_unique_prompts", True),
    ({"vllm_guided_decoding_regex": "a+"}, "vllm_structured_outputs_regex", "a+"),
    ({"vllm_importance_sampling_cap": 2.0}, "vllm_importance_sampling_clip_max", 2.0),
    ({"vllm_max_model_len": 512}, "vllm_max_model_length", 512),
]
INERT = [name for name, row in legacy.LEGACY.items() if row.into is None and row.act is None]


def test_every_earlier_field_is_moved_renamed_or_without_effect():
    elsewhere = {"logging_dir", "use_transformers_paged"}  # below, and in tests/trainer/test_engines.py
    covered = {name for settings, *_ in (*MOVED, *RENAMED) for name in settings}
    assert set(legacy.LEGACY) == (covered & set(legacy.LEGACY)) | set(INERT) | elsewhere


@pytest.mark.parametrize(("settings", "field", "value"), MOVED)
def test_legacy_values_move_to_their_new_field(settings, field, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = make(**settings)
    assert getattr(config, field) == value
    for name in settings:
        if name in legacy.LEGACY:
            assert getattr(config, name) == legacy.LEGACY[name].default


def test_warmup_ratio_is_a_share_of_the_steps():
    assert make(warmup_ratio=0.1).get_warmup_steps(200) == 20


def test_a_count_of_warmup_steps_wins_over_the_ratio():
    with pytest.warns(FutureWarning, match="warmup_ratio=0.1 is not used, because warmup_steps=5"):
        assert make(warmup_ratio=0.1, warmup_steps=5).warmup_steps == 5


def test_logging_dir_is_where_tensorboard_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "before")
    make(logging_dir=str(tmp_path))
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path)


@pytest.mark.parametrize(("settings", "field", "value"), RENAMED)
def test_renamed_fields_warn_and_work(settings, field, value):
    with pytest.warns(FutureWarning, match=f"has a new name, {field}"):
        assert getattr(make(**settings), field) == value


def test_both_names_of_a_field_must_agree():
    with pytest.raises(ConfigError, match=r"vllm_importance_sampling_cap=2.0 is the earlier name of .*_clip_max=5.0"):
        make(vllm_importance_sampling_cap=2.0, vllm_importance_sampling_clip_max=5.0)
    with pytest.warns(FutureWarning, match="has a new name"):
        make(vllm_importance_sampling_cap=2.0, vllm_importance_sampling_clip_max=2.0)


OTHER = {bool: True, str: "x", int: 3, str | None: "x", int | None: 3}


@pytest.mark.parametrize("name", INERT)
def test_a_legacy_field_without_effect_gives_one_warning(name):
    row = legacy.LEGACY[name]
    value = not row.default if row.type is bool else OTHER[row.type]
    with pytest.warns(FutureWarning, match=f"have no effect and can go: {name}=") as caught:
        config = make(**{name: value})
    assert len(caught) == 1
    assert row.why in str(caught[0].message)
    assert getattr(config, name) == row.default


def test_several_fields_without_effect_are_one_warning_at_the_callers_line():
    with pytest.warns(FutureWarning) as caught:
        GRPOConfig(use_cpu=True, overwrite_output_dir=True, ray_scope="all")
    assert len(caught) == 1
    assert caught[0].filename == __file__
