"""Every model and adapter fits the checkpoint that it was saved as, with and without a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_hybrids
import tiny_vlms
import torch

from groupgrad.checkpoints.manifest import Manifest
from groupgrad.models.adapters import adapter_settings
from groupgrad.trainer.resumed_optimizer import matched_by_name
from groupgrad.trainer.resumed_parameters import misfit, trained_parameters


def assert_fits(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    named = Manifest(1, 1, {}, trained=trained_parameters(model), adapter=adapter_settings(model))
    for manifest in (None, named):
        assert misfit(folder, manifest, model, None, by_order=False).error(folder, partial=True) is None


def test_every_architecture_fits(any_model, tmp_path):
    assert_fits(any_model, tmp_path)


@pytest.mark.parametrize("name", tiny_vlms.NAMES)
def test_every_model_that_takes_images_fits(name, tmp_path):
    assert_fits(tiny_vlms.build(name).model, tmp_path)


@pytest.mark.parametrize("name", tiny_hybrids.CONFIGS)
def test_every_hybrid_fits(name, tmp_path):
    assert_fits(tiny_hybrids.make_hybrid(name), tmp_path)


def test_weights_in_several_files_fit(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert misfit(tmp_path, None, model, None, by_order=False).error(tmp_path, partial=True) is None


ADAPTERS = {
    "plain": peft.LoraConfig(target_modules="all-linear"),
    "dora": peft.LoraConfig(target_modules=["q_proj"], use_dora=True),
    "ranks": peft.LoraConfig(target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 2}, use_rslora=True),
    "embedding": peft.LoraConfig(target_modules=["embed_tokens", "q_proj"]),
    "whole modules": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "biases": peft.LoraConfig(target_modules=["q_proj"], lora_bias=True),
    "expression": peft.LoraConfig(target_modules=r".*layers\.1.*\.v_proj"),
    "loha": peft.LoHaConfig(target_modules=["q_proj"]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize(("kind", "name"), [*((kind, "default") for kind in ADAPTERS), ("whole modules", "policy")])
def test_every_adapter_fits(model, tmp_path, kind, name):
    assert_fits(peft.get_peft_model(model, ADAPTERS[kind], adapter_name=name), tmp_path)


def test_states_are_matched_by_name_into_other_groups():
    """Worked by hand: a, b | c becomes d, c | b, a; d is new, and its group takes c's options."""
    state = {
        "state": {0: {"m": "of a"}, 1: {"m": "of b"}, 2: {"m": "of c"}},
        "param_groups": [
            {"lr": 0.5, "weight_decay": 0.1, "params": [0, 1]},
            {"lr": 0.5, "weight_decay": 0.0, "params": [2]},
        ],
    }
    groups = [{"lr": 9.0, "weight_decay": 9.0, "params": [0, 1]}, {"lr": 9.0, "weight_decay": 9.0, "params": [2, 3]}]
    matched = matched_by_name(state, ["a", "b", "c"], groups, ["d", "c", "b", "a"])
    assert matched["state"] == {1: {"m": "of c"}, 2: {"m": "of b"}, 3: {"m": "of a"}}
    assert matched["param_groups"] == [
        {"lr": 0.5, "weight_decay": 0.0, "params": [0, 1]},
        {"lr": 0.5, "weight_decay": 0.1, "params": [2, 3]},
    ]
    (alone,) = matched_by_name(state, ["a", "b", "c"], [{**groups[0], "params": [0]}], ["d"])["param_groups"]
    assert alone == {"lr": 0.5, "weight_decay": 9.0, "params": [0]}


def test_a_description_has_dtype_and_shape():
    layer = torch.nn.Linear(3, 2).to(torch.bfloat16)
    assert trained_parameters(layer) == {"weight": "bfloat16 2x3", "bias": "bfloat16 2"}
    backwards = torch.optim.SGD([layer.bias, layer.weight], lr=1.0)
    assert list(trained_parameters(layer, backwards)) == ["bias", "weight"]
