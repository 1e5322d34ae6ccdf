"""Copies of a config equal it, and can change any one field."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import warnings

import pytest
import torch

from groupgrad import GRPOConfig

VARIATIONS: dict[str, dict] = {
    "defaults": {},
    "plain values": {
        "output_dir": "runs/x", "seed": 7, "data_seed": 3, "max_steps": 10, "beta": 0.04, "sync_ref_model": True,
        "reward_weights": [1.0, 0.5], "top_k": 50, "min_p": 0.05, "logging_steps": 0.25, "save_steps": 0.5,
        "accelerator_config": {"even_batches": False}, "use_adaptive_entropy": True, "entropy_coef": 0.01,
        "loss_type": "cispo", "epsilon_high": 4.0, "warmup_steps": 20, "report_to": ["tensorboard"],
    },
    "spellings": {
        "report_to": "none", "scale_rewards": False, "pad_to_multiple_of": "16", "debug": "underflow_overflow",
        "include_num_input_tokens_seen": True, "torch_compile_backend": "inductor", "loss_type": "cispo",
    },
    "more spellings": {"report_to": None, "scale_rewards": True, "bf16": True, "optim": "adamw_8bit"},
    "dicts as texts": {
        "generation_kwargs": '{"suppress_tokens": [1, 2]}', "chat_template_kwargs": {"enable_thinking": False},
        "model_init_kwargs": '{"dtype": "float32"}', "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": '{"min_lr": 1e-7}', "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "types in dicts": {"model_init_kwargs": {"dtype": torch.bfloat16, "attn_implementation": "eager"}, "fp16": True},
    "steps of a batch": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": False},
    "size of a batch": {"generation_batch_size": 32, "bf16": False},
    "evaluated": {"eval_strategy": "steps", "num_generations_eval": 2},
    "the best model": {"eval_strategy": "epoch", "load_best_model_at_end": True, "save_strategy": "epoch"},
    "of earlier releases": {
        "warmup_ratio": 0.1, "adafactor": True, "no_cuda": True, "per_gpu_train_batch_size": 16,
        "overwrite_output_dir": True, "save_safetensors": False, "max_prompt_length": 512, "use_liger_loss": True,
        "vllm_importance_sampling_cap": 2.0, "vllm_mode": "server", "push_to_hub_model_id": "m",
        "push_to_hub_organization": "o", "hub_token": "secret",
    },
}  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore")


def make(**settings) -> GRPOConfig:
    return GRPOConfig(**{"use_cpu": True, **settings})


@pytest.mark.parametrize("settings", VARIATIONS.values(), ids=VARIATIONS)
def test_every_way_to_copy_gives_an_equal_config(settings):
    config = make(**settings)
    assert dataclasses.replace(config) == config
    assert GRPOConfig(**config.to_dict()) == config
    assert copy.deepcopy(config) == config
    assert copy.copy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    # A copy of a copy is equal too.
    assert GRPOConfig(**dataclasses.replace(config).to_dict()) == config


@pytest.mark.parametrize("settings", VARIATIONS.values(), ids=VARIATIONS)
def test_a_copy_can_change_one_field_and_nothing_else(settings):
    config = make(**settings)
    changed = dataclasses.replace(config, beta=0.1)
    assert changed.beta == 0.1
    assert dataclasses.replace(changed, beta=config.beta) == config
    before, after = config.to_dict(), changed.to_dict()
    assert {name for name, value in after.items() if before[name] != value} == {"beta"}


def test_to_dict_is_json_and_leaves_the_config_alone():
    config = make(model_init_kwargs={"dtype": torch.float32}, chat_template_kwargs={"a": {"b": 1}})
    before = copy.deepcopy(config)
    data = json.loads(json.dumps(config.to_dict()))
    assert GRPOConfig(**data) == config == before
    config.to_dict()["chat_template_kwargs"]["c"] = 1
    assert config == before


def test_a_config_does_not_share_the_callers_dict():
    kwargs = {"dtype": torch.float16}
    config = make(model_init_kwargs=kwargs)
    assert kwargs == {"dtype": torch.float16}
    assert config.model_init_kwargs == {"dtype": "float16"}


def test_batch_settings_that_exclude_each_other_are_never_filled_in():
    config = make(steps_per_generation=2)
    assert config.generation_batch_size is None
    assert config.generation_batch_size_resolved == 16
    other = dataclasses.replace(config, steps_per_generation=None, generation_batch_size=24)
    assert (other.steps_per_generation, other.steps_per_generation_resolved) == (None, 3)
    larger = dataclasses.replace(make(), per_device_train_batch_size=32)
    assert larger.generation_batch_size_resolved == 32


def test_tokens_are_hidden_and_copied():
    config = make(hub_token="secret")
    assert "secret" not in repr(config)
    assert "secret" not in json.dumps(config.to_dict())
    assert dataclasses.replace(config, beta=0.1).hub_token == "secret"
    assert GRPOConfig(**config.to_dict()).hub_token is None
    assert make().to_dict()["hub_token"] is None


def test_checkpointing_has_two_names_and_one_value():
    assert make(gradient_checkpointing=True).activation_checkpointing is True
    assert make(gradient_checkpointing=False).gradient_checkpointing is False
    off = dataclasses.replace(make(), gradient_checkpointing=False)
    assert (off.gradient_checkpointing, off.activation_checkpointing) == (False, False)
    off = make(activation_checkpointing=False)
    assert (off.gradient_checkpointing, off.activation_checkpointing) == (False, False)
    with pytest.warns(UserWarning, match="one setting with two names; it is off"):
        make(gradient_checkpointing=True, activation_checkpointing=False)
    with pytest.warns(UserWarning, match="Set both to True to turn it on"):
        assert dataclasses.replace(off, gradient_checkpointing=True).gradient_checkpointing is False
    assert make(gradient_checkpointing_kwargs={"debug": True}).activation_checkpointing_kwargs == {"debug": True}
    off = make(gradient_checkpointing=False, activation_checkpointing=False)
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        for value in (True, False):
            setattr(off, name, value)
            off.settle()
            assert (off.gradient_checkpointing, off.activation_checkpointing) == (value, value)


def test_checkpointing_is_by_need_on_a_cpu_and_on_elsewhere(monkeypatch):
    unset = make(use_cpu=True)
    assert (unset.gradient_checkpointing, unset.activation_checkpointing) == (None, None)
    assert dataclasses.replace(unset, beta=0.1).gradient_checkpointing is None
    monkeypatch.setattr(GRPOConfig, "device", torch.device("meta"))
    on = make()
    assert (on.gradient_checkpointing, on.activation_checkpointing) == (True, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings in ({}, {"gradient_checkpointing": False}, {"gradient_checkpointing_kwargs": {"debug": True}}):
            make(**settings)


@pytest.mark.parametrize("settings", VARIATIONS.values(), ids=VARIATIONS)
def test_settings_that_are_assigned_later_get_what_the_constructor_does(settings):
    config = make()
    for name, value in settings.items():
        setattr(config, name, value)
    config.settle()
    assert config == make(**settings)
    assert pickle.loads(pickle.dumps(config)) == dataclasses.replace(config, hub_token=None)


def test_a_late_setting_is_checked_and_its_warning_said_once():
    config = make()
    config.model_init_kwargs = {}
    config.model_init_kwargs["dtype"] = torch.float32
    config.settle()
    assert config.model_init_kwargs == {"dtype": "float32"}
    config.temperature = 0.0
    with pytest.raises(ValueError, match=r"temperature=0\.0 cannot work"):
        config.settle()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = make(loss_type="cispo", top_k=3)
        config.top_k = 4
        config.settle()
    assert sum("epsilon_high" in str(warning.message) for warning in caught) == 1


BEST = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
"""Settings from which `metric_for_best_model` "loss" and `greater_is_better` False are derived."""


def test_a_best_model_by_the_lowest_reward_is_warned_of():
    """As of a copy, which keeps `greater_is_better` as it followed from another metric."""
    with pytest.warns(UserWarning, match="greater_is_better=False with metric_for_best_model='reward' keeps"):
        dataclasses.replace(make(**BEST), metric_for_best_model="reward")


def test_a_late_setting_wins_over_its_older_name_given_before():
    config = make(push_to_hub_model_id="m")
    config.hub_model_id = "other"
    config.settle()
    assert config.hub_model_id == "other"


def test_a_late_setting_that_cannot_work_leaves_the_config_as_it_was():
    config = make(**BEST)
    config.logging_steps, config.temperature = 5, 0.0
    with pytest.raises(ValueError, match=r"temperature=0\.0 cannot work"):
        config.settle()
    config.temperature = 1.0
    config.settle()
    assert config == make(**BEST, logging_steps=5)
