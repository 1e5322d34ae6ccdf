"""The policy's weights under the names of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from groupgrad.models.weights import adapter_files, checkpoint_weights

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3-moe", "gpt2", "gemma2 (soft caps)"])
def test_names_and_values_are_those_of_a_checkpoint(name: str, build: Any, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")

    served = dict(checkpoint_weights(model))

    assert set(served) == set(saved)
    assert all(torch.equal(served[key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_shapes_are_known_without_values(name: str, build: Any) -> None:
    model = build(name)

    shapes = list(checkpoint_weights(model, shapes_only=True))

    assert [(key, tensor.shape) for key, tensor in shapes] == [
        (key, tensor.shape) for key, tensor in checkpoint_weights(model)
    ]
    assert all(tensor.is_meta for _, tensor in shapes)


def adapted(model: Any, **changes: Any) -> Any:
    settings = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**{**settings, **changes}))


@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_merged_weights_compute_what_the_adapter_computes(changes: dict[str, Any], build: Any) -> None:
    model = adapted(build("qwen3"), **changes)
    if "modules_to_save" in changes:
        with torch.no_grad():
            model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2.0)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    before = {key: value.clone() for key, value in model.state_dict().items()}

    plain = build("qwen3", seed=9)
    plain.load_state_dict(dict(checkpoint_weights(model)))

    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model.eval()(ids).logits, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert [key for key, _ in checkpoint_weights(model, shapes_only=True)] == [
        key for key, _ in checkpoint_weights(model)
    ]


def test_unmerged_weights_are_those_under_the_adapter(build: Any) -> None:
    before = {key: value.clone() for key, value in build("qwen3").state_dict().items()}

    served = dict(checkpoint_weights(adapted(build("qwen3")), merge=False))

    assert set(served) == set(before)
    assert all(torch.equal(served[key], before[key]) for key in before)


def test_a_float32_adapter_is_merged_into_bfloat16_weights_with_one_rounding(build: Any) -> None:
    model = adapted(build("qwen3").to(torch.bfloat16))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    delta = 4.0 * (layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float())

    served = dict(checkpoint_weights(model))["model.layers.0.self_attn.q_proj.weight"]

    assert torch.equal(served, (layer.base_layer.weight.float() + delta).to(torch.bfloat16))


def test_an_adapter_is_what_peft_saves(build: Any, tmp_path: Path) -> None:
    model = adapted(build("qwen3"))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")

    files = adapter_files(model)

    assert set(files.tensors) == set(saved)
    assert all(torch.equal(files.tensors[key], saved[key]) for key in saved)
    assert files.config["r"] == 2 and files.config["target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.parametrize(
    ("changes", "words"), [({"use_dora": True}, "DoRA"), ({"modules_to_save": ["lm_head"]}, "modules_to_save")]
)
def test_adapters_that_vllm_cannot_load_are_named(changes: dict[str, Any], words: str, build: Any) -> None:
    with pytest.raises(ValueError, match=rf"{words}.*send the weights instead"):
        adapter_files(adapted(build("qwen3"), **changes))


def test_an_adapter_on_tied_embeddings_is_rejected(build: Any) -> None:
    with pytest.raises(ValueError, match="tied to another weight"):
        list(checkpoint_weights(adapted(build("qwen3-tied"), target_modules=["embed_tokens"])))


def test_a_prompt_adapter_is_rejected(build: Any) -> None:
    model = peft.get_peft_model(
        build("qwen3"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, num_layers=2)
    )
    with pytest.raises(ValueError, match="learns a prompt"):
        list(checkpoint_weights(model))


def test_an_unfinished_iteration_leaves_gradients_enabled(model: Any) -> None:
    """A push that failed half way is retried while its error still holds the first generator."""
    first = checkpoint_weights(model)
    next(first)
    assert torch.is_grad_enabled()
    assert not any(tensor.requires_grad for _, tensor in checkpoint_weights(model))
    del first
    assert torch.is_grad_enabled()
