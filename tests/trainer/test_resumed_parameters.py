"""Every model loads the checkpoint that it was saved as, and every adapter fits, with and without a manifest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import tiny_hybrids
import tiny_vlms
from safetensors.torch import load_file
from small_adapters import KINDS

from groupgrad.checkpoints.choosing import ResumePoint
from groupgrad.checkpoints.manifest import Manifest
from groupgrad.models.adapters import adapter_settings
from groupgrad.models.load import load_renamed_checkpoint
from groupgrad.trainer.resuming import _check_parameters, raise_if_missing, trained_parameters


def assert_loads(model: Any, folder: Path) -> None:
    """The check of missing weights finds none in a checkpoint of the model itself."""
    model.save_pretrained(folder)
    missing = load_renamed_checkpoint(model, folder)
    if missing is None:
        missing = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False).missing_keys
    raise_if_missing(missing, model, folder)


def test_every_architecture_loads(any_model, tmp_path):
    assert_loads(any_model, tmp_path)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", tiny_vlms.NAMES)
def test_every_model_that_takes_images_loads(name, tmp_path):
    assert_loads(tiny_vlms.build(name).model, tmp_path)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", tiny_hybrids.CONFIGS)
def test_every_hybrid_loads(name, tmp_path):
    assert_loads(tiny_hybrids.make_hybrid(name), tmp_path)


ADAPTERS = {
    **{kind: KINDS[kind]() for kind in ("DoRA", "whole head", "IA3")},
    "plain": peft.LoraConfig(target_modules="all-linear"),
    "ranks": peft.LoraConfig(target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 2}, use_rslora=True),
    "embedding": peft.LoraConfig(target_modules=["embed_tokens", "q_proj"]),
    "biases": peft.LoraConfig(target_modules=["q_proj"], lora_bias=True),
    "expression": peft.LoraConfig(target_modules=r".*layers\.1.*\.v_proj"),
    "loha": peft.LoHaConfig(target_modules=["q_proj"]),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize(("kind", "name"), [*((kind, "default") for kind in ADAPTERS), ("whole head", "policy")])
def test_every_adapter_fits(model, tmp_path, kind, name):
    adapted: Any = peft.get_peft_model(model, ADAPTERS[kind], adapter_name=name)
    adapted.save_pretrained(tmp_path)
    args = SimpleNamespace(allow_partial_resume=False)
    trainer = SimpleNamespace(model=adapted, optimizer=None, is_deepspeed_enabled=False, args=args)
    named = Manifest(1, 1, {}, trained=trained_parameters(adapted), adapter=adapter_settings(adapted))
    for manifest in (None, named):
        _check_parameters(trainer, ResumePoint(tmp_path, manifest), None)
