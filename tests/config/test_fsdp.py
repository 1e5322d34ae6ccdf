"""FSDP's settings: which take effect, which are refused in words, and which are named as without effect."""

from __future__ import annotations

import pytest
from transformers import TrainingArguments

from groupgrad import GRPOConfig
from groupgrad.config.launcher import fsdp_layer_classes, fsdp_settings, uses_fsdp
from groupgrad.errors import ConfigError
from groupgrad.trainer.build import fsdp_options


@pytest.fixture
def two_processes(monkeypatch):
    """Configurations count two processes."""
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))


@pytest.fixture
def launched(monkeypatch):
    """The environment that accelerate's launcher sets for an FSDP 2 configuration without further options."""
    variables = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "One,Other",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def config(**settings):
    return GRPOConfig(use_cpu=True, bf16=False, report_to="none", **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fsdp_config": {"version": 1}}, ["fsdp_version 1", "only FSDP 2 is supported"]),
        ({"optim": "adafactor"}, ["optim='adafactor'", "adamw_torch, adamw_torch_fused, sgd"]),
        ({"fp16": True}, ["fp16=True (set bf16=True, or neither)"]),
        ({"sync_ref_model": True, "beta": 0.1}, ["sync_ref_model=True (set it to False)"]),
        ({"cast_lm_head_to_fp32": True}, ["cast_lm_head_to_fp32=True (set it to False)"]),
        ({"torch_compile": True}, ["torch_compile=True (set it to False)"]),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            ["use_reentrant=True"],
        ),
        ({"use_vllm": True}, ["vllm_mode='colocate' with fsdp", "Set vllm_mode='server'"]),
    ],
)
def test_what_fsdp_does_not_go_with_is_refused_in_words(two_processes, settings, words):
    with pytest.raises(ConfigError) as caught:
        config(fsdp=True, **settings)
    (problem,) = caught.value.problems
    assert all(word in problem for word in words), problem


def test_a_configuration_takes_effect(two_processes):
    made = config(fsdp="shard_grad_op", fsdp_config={"transformer_layer_cls_to_wrap": "Block"})
    options = fsdp_options(made)
    assert (options.layer_classes, options.reshard_after_forward, options.compute_dtype) == (("Block",), False, None)
    assert uses_fsdp(made) and uses_fsdp(config(fsdp="true"))
    assert not uses_fsdp(config()) and not uses_fsdp(config(fsdp="false"))
    assert config(fsdp=True, fsdp_config={"activation_checkpointing": True}).gradient_checkpointing is True
    assert config(fsdp=True).gradient_checkpointing is None


def test_settings_without_effect_are_named(two_processes):
    unread = {"state_dict_type": "FULL_STATE_DICT", "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7}
    text = "'FULL_STATE_DICT', auto_wrap_policy='SIZE_BASED_WRAP', min_num_params=7"
    with pytest.warns(UserWarning, match=text):
        config(fsdp=True, fsdp_config=unread)
    with pytest.warns(UserWarning, match=r"ddp_bucket_cap_mb=7 \(DeepSpeed or FSDP joins"):
        config(fsdp=True, ddp_bucket_cap_mb=7)


def test_the_launchers_configuration_takes_effect(two_processes, launched):
    made = config()
    assert fsdp_layer_classes(made) == ("One", "Other")
    assert fsdp_options(made).reshard_after_forward is False
    assert made.gradient_checkpointing is True
    assert "min_num_params" not in fsdp_settings(made)


def test_the_launchers_first_version_is_refused(two_processes, launched, monkeypatch):
    monkeypatch.delenv("FSDP_VERSION")
    with pytest.raises(ConfigError, match="fsdp_version 1, and only FSDP 2 is supported"):
        config()


@pytest.mark.parametrize(
    "settings", [{"fsdp_config": {"cpu_offload": True}}, {"fsdp_config": {"fsdp_offload_params": True}}]
)
def test_shards_can_be_kept_in_host_memory(two_processes, settings):
    assert fsdp_options(config(fsdp=True, **settings)).cpu_offload is True
    assert fsdp_options(config(fsdp=True)).cpu_offload is False


def test_the_launchers_configuration_can_offload(two_processes, launched, monkeypatch):
    assert fsdp_options(config()).cpu_offload is False
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert fsdp_options(config()).cpu_offload is True
