"""Adapters are added, loaded, and rejected where they do not fit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_adapters import logprobs, lora

from groupgrad.models.adapters import active_adapters, add_adapter, check_adapter, is_adapted, load_adapter
from groupgrad.models.load import load_policy

peft = pytest.importorskip("peft")

LOADING: dict[str, Any] = {"trust_remote_code": False, "quantization_config": None, "on_device": False}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "modules of another architecture": (
        {"target_modules": ["query_key_value", "dense"]},
        r"peft_config does not fit this Qwen3ForCausalLM: .*query_key_value",
    ),
    "layers that are not there": ({"layers_to_transform": [9]}, r"does not fit this Qwen3ForCausalLM: .*\[9\]"),
    "a module of no kind that can be adapted": ({"target_modules": ["norm"]}, "does not fit this .*RMSNorm"),
    "a whole module that is not there": (
        {"modules_to_save": ["lm_head", "score"]},
        r"modules_to_save names score, and this Qwen3ForCausalLM has none of that name; take it out",
    ),
    "a parameter that is not there": (
        {"target_parameters": ["mlp.experts.down_proj"]},
        r"target_parameters names mlp\.experts\.down_proj, .* has none of that name",
    ),
    "another task": ({"task_type": "SEQ_CLS"}, "peft_config.task_type is 'SEQ_CLS', .* set it to 'CAUSAL_LM'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_incompatible_setting_is_rejected_by_name(case: str, build):
    settings, message = REFUSED[case]
    model = build("qwen3")
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=message):
        add_adapter(model, lora(**settings))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == before


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("kind", ["lora_bias", "BEFT"])
def test_a_bias_for_a_layer_without_one_is_rejected(kind: str, build):
    """peft cannot merge it, which it says at the first merge."""
    config = lora(lora_bias=True) if kind == "lora_bias" else peft.BeftConfig(target_modules=["q_proj", "v_proj"])
    with pytest.raises(ValueError, match=r"adds a bias to .*_proj, which has none, so peft cannot merge it"):
        check_adapter(add_adapter(build("qwen3"), config))


def test_unknown_feedforward_modules_are_rejected(build):
    """peft ignores them silently."""
    config = peft.IA3Config(target_modules="all-linear", feedforward_modules=["down_proj", "fc2"])
    with pytest.raises(ValueError, match="feedforward_modules names fc2, and this Qwen3ForCausalLM has none"):
        add_adapter(build("qwen3"), config)


def test_unknown_target_modules_among_known_ones_are_a_warning(build):
    with pytest.warns(UserWarning, match="target_modules names Wqkv, .* on the others alone"):
        model = add_adapter(build("qwen3"), lora(target_modules=["q_proj", "Wqkv"]))
    adapted = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"q_proj"}


def test_one_configuration_serves_several_architectures(build):
    """peft writes the modules that it chose into its config."""
    config = lora(target_modules=None)
    for architecture, name in (("gpt2", "c_attn"), ("qwen3", "q_proj")):
        model = add_adapter(build(architecture), config)
        assert any(name in key for key, p in model.named_parameters() if p.requires_grad)
    assert config.target_modules is None


def test_an_adapter_by_its_directory(build, batch, tmp_path: Path):
    build("qwen3").save_pretrained(tmp_path / "base")
    base = load_policy(str(tmp_path / "base"), {}, **LOADING)
    trained = add_adapter(base, lora(modules_to_save=["lm_head"]))
    trained.save_pretrained(tmp_path / "adapter")
    actual = load_policy(str(tmp_path / "adapter"), {"dtype": "float32"}, **LOADING)
    assert is_adapted(actual)
    assert active_adapters(actual) == ["default"]
    torch.testing.assert_close(logprobs(actual, batch), logprobs(trained, batch), rtol=0, atol=0)
    trainable = {name for name, p in actual.named_parameters() if p.requires_grad}
    assert trainable == {name for name, p in trained.named_parameters() if p.requires_grad}


def test_an_adapter_whose_base_model_lies_elsewhere(build, tmp_path: Path):
    """The adapter's directory was copied to another machine."""
    build("qwen3").save_pretrained(tmp_path / "base")
    add_adapter(load_policy(str(tmp_path / "base"), {}, **LOADING), lora()).save_pretrained(tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"base model .*base', which is not here; .*PeftModel\.from_pretrained\("):
        load_policy(str(tmp_path / "adapter"), {}, **LOADING)


def test_an_adapter_that_names_no_base_model(build, tmp_path: Path):
    add_adapter(build("qwen3"), lora()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"base model None, which is not here; .*PeftModel\.from_pretrained\("):
        load_policy(str(tmp_path), {}, **LOADING)


MISFITS = {
    "other names": ("gpt2", {}, "does not fit GPT2LMHeadModel; it was made for another model: .*Target modules"),
    "other widths": ("qwen3", {"hidden_size": 64}, "does not fit Qwen3ForCausalLM.*size mismatch"),
    "more layers": ("qwen3", {"num_hidden_layers": 3}, "does not fit Qwen3ForCausalLM.*missing adapter keys.*layers.2"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_an_adapter_of_another_architecture_is_rejected(case: str, build, tmp_path: Path):
    architecture, settings, message = MISFITS[case]
    add_adapter(build("qwen3"), lora()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_adapter(build(architecture, **settings), str(tmp_path))


def test_another_base_model_by_name_is_a_warning(build, tmp_path: Path):
    for name in ("one", "two"):
        build("qwen3").save_pretrained(tmp_path / name)
    one, two = (load_policy(str(tmp_path / name), {}, **LOADING) for name in ("one", "two"))
    peft.get_peft_model(one, lora()).save_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(two, str(tmp_path / "adapter"), is_trainable=True)
    with pytest.warns(UserWarning, match=r"was trained on .*one, and the model was loaded from .*two"):
        check_adapter(model)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "elsewhere/two"}))
    model = peft.PeftModel.from_pretrained(load_policy(str(tmp_path / "two"), {}, **LOADING), str(tmp_path / "adapter"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_adapter(model)


def test_a_merged_adapter_is_rejected(build):
    model = add_adapter(build("qwen3"), lora())
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"the adapter is merged into the weights .*model\.unmerge_adapter\(\)"):
        check_adapter(model)
    model.unmerge_adapter()
    check_adapter(model)


def test_an_inactive_adapter_is_rejected(build):
    model = add_adapter(build("qwen3"), lora())
    model.add_adapter("second", lora())
    check_adapter(model)
    model.set_adapter("second", inference_mode=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default." in name)
    with pytest.raises(
        ValueError, match=r"not in use would train; the adapter in use is second: call model\.set_adapter"
    ):
        check_adapter(model)


def test_trained_weights_that_are_not_saved_are_a_warning(build):
    model = add_adapter(build("qwen3"), lora())
    model.get_base_model().lm_head.weight.requires_grad_(True)
    with pytest.warns(
        UserWarning, match=r"lm_head\.weight \(1 weights of the base model\) .* only the adapter is saved"
    ):
        check_adapter(model)
    kept = [
        lora(bias="all"),
        lora(modules_to_save=["lm_head"]),
        lora(trainable_token_indices=[3]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    ]
    for config in kept:
        model = add_adapter(build("qwen3", attention_bias=True), config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_adapter(model)
