"""Copies of a config equal it, and can change any one field."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import warnings
from itertools import permutations

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
    for changes in ({"gradient_checkpointing": True}, {"activation_checkpointing": True}):
        on = dataclasses.replace(off, **changes)
        assert (on.gradient_checkpointing, on.activation_checkpointing) == (True, True)
    assert make(gradient_checkpointing_kwargs={"debug": True}).activation_checkpointing_kwargs == {"debug": True}
    off = make(gradient_checkpointing=False, activation_checkpointing=False)
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        for value in (True, False):
            setattr(off, name, value)
            off.settle()
            assert (off.gradient_checkpointing, off.activation_checkpointing) == (value, value)


def test_what_a_pickled_config_is_assigned_later_is_kept_though_it_was_derived_so():
    config = pickle.loads(pickle.dumps(make(eval_strategy="steps", logging_steps=10)))
    config.logging_steps, config.eval_steps = 50, 10
    config.settle()
    assert config.eval_steps == 10


def test_records_of_another_release_are_left_out():
    for record in ("{}", {"a_setting_of_then": [None, 1]}):
        assert "a_setting_of_then" not in make(derived_settings=record).derived_settings


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


def _without_other_names(first: dict, late: dict) -> dict:
    """`first` without settings that `late` has under their other name."""
    others = {name.replace(*pair) for name in late for pair in permutations(("gradient", "activation"))}
    return {name: value for name, value in first.items() if name not in others}


@pytest.mark.parametrize(
    ("first", "late", "expected"),
    [
        (BEST, {"metric_for_best_model": "reward"}, {"greater_is_better": True}),
        (BEST, {"metric_for_best_model": "reward", "greater_is_better": False}, {"greater_is_better": False}),
        ({"eval_strategy": "steps"}, {"logging_steps": 50}, {"eval_steps": 50}),
        ({"eval_strategy": "steps"}, {"logging_steps": 50, "eval_steps": 10}, {"eval_steps": 10}),
        ({"eval_strategy": "steps", "eval_steps": 10}, {"logging_steps": 50}, {"eval_steps": 10}),
        ({"eval_strategy": "steps"}, {"eval_strategy": "no"}, {"do_eval": False}),
        ({"torch_compile_backend": "eager"}, {"torch_compile_backend": None}, {"torch_compile": False}),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
            {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
            {"activation_checkpointing_kwargs": {"use_reentrant": False}},
        ),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 20}, {"warmup_steps": 20}),
        (
            {"activation_checkpointing_kwargs": {"use_reentrant": True}},
            {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
            {"activation_checkpointing_kwargs": {"use_reentrant": False}},
        ),
        ({"gradient_checkpointing": False}, {"gradient_checkpointing": True}, {"activation_checkpointing": True}),
        ({"activation_checkpointing": False}, {"gradient_checkpointing": True}, {"activation_checkpointing": True}),
        ({"gradient_checkpointing": True}, {"activation_checkpointing": False}, {"gradient_checkpointing": False}),
        (BEST, {"load_best_model_at_end": False}, {"metric_for_best_model": None, "greater_is_better": None}),
    ],
)
def test_what_follows_from_other_settings_follows_from_those_assigned_later(first, late, expected):
    config = make(**first)
    data = json.loads(json.dumps(config.to_dict()))
    again = pickle.loads(pickle.dumps(GRPOConfig(**data)))
    is_known = not any(getattr(config, name) == value for name, value in late.items())
    for each in (config, again) if is_known else ():
        replaced = dataclasses.replace(each, **late), GRPOConfig(**{**each.to_dict(), **late})
        for other in (*replaced, dataclasses.replace(dataclasses.replace(each, beta=0.1), **late, beta=each.beta)):
            assert other == make(**{**_without_other_names(first, late), **late})
    for name, value in late.items():
        setattr(config, name, value)
    copied = copy.deepcopy(config)
    copied.to_dict()
    for each in (config, copied):
        each.settle()
        assert each == make(**{**_without_other_names(first, late), **late})
        assert {name: getattr(each, name) for name in expected} == expected


def test_a_copy_says_which_settings_follow_again():
    """A value that was derived, and is given to a copy beside others, cannot be told from one that was copied."""
    config = make(eval_strategy="steps")
    with pytest.warns(UserWarning, match=r"eval_steps=50 in place of 10: .*Assign config\.eval_steps"):
        copied = dataclasses.replace(config, logging_steps=50, eval_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied.eval_steps = 10
        copied.settle()
        assert copied.eval_steps == 10
        assert dataclasses.replace(copied, logging_steps=30).eval_steps == 10
        assert dataclasses.replace(config, beta=0.1, eval_steps=20).eval_steps == 20


def test_a_late_setting_wins_over_its_older_name_given_before():
    config = make(push_to_hub_model_id="m")
    config.hub_model_id = "other"
    config.settle()
    assert config.hub_model_id == "other"


def test_fp16_may_be_assigned_later_where_bf16_is_the_default(monkeypatch):
    monkeypatch.setattr("groupgrad.compat.has_bf16_accelerator", lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    config = GRPOConfig()
    assert config.bf16 is True
    copied = dataclasses.replace(config, fp16=True)
    assert (copied.fp16, copied.bf16) == (True, False)
    config.fp16 = True
    config.settle()
    assert (config.fp16, config.bf16) == (True, False)


def test_a_late_setting_that_cannot_work_leaves_the_config_as_it_was():
    config = make(**BEST)
    config.metric_for_best_model = "reward"
    config.temperature = 0.0
    with pytest.raises(ValueError, match=r"temperature=0\.0 cannot work"):
        config.settle()
    assert config.greater_is_better is False
    config.temperature = 1.0
    config.settle()
    assert config == make(**BEST, metric_for_best_model="reward")
