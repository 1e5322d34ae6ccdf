"""The logit transform of every architecture gives the model's own logits; unknown heads have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from groupgrad.models.load import cast_head_to_float32
from groupgrad.scoring.logit_transform import head_layer, logit_transform
from groupgrad.scoring.tiled_head import LogitTransform, OutputHead, tiled_scores


def head_input(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H) hidden states as the head got them, and the model's own logits (T, V)."""
    seen: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    handle.remove()
    return seen[0][0], logits


def assert_gives_the_model_its_logits(model: Any, transform: LogitTransform) -> None:
    ids = torch.tensor([5, 9, 13, 2, 40, 7, 7, 31])
    hidden, logits = head_input(model, ids)
    head = model.get_output_embeddings()
    for temperature in (1.0, 0.7):
        actual = tiled_scores(
            hidden, OutputHead(head.weight, head.bias), ids, transform=transform, temperature=temperature
        )
        expected = torch.log_softmax(logits.double() / temperature, -1)
        assert float(expected.std()) > 0.05
        logprobs = expected.gather(1, ids[:, None]).squeeze(1)
        torch.testing.assert_close(actual.logprobs.double(), logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(actual.entropy.double(), -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-5)


def test_every_architecture(any_model):
    transform = logit_transform(any_model)
    assert transform is not None
    assert_gives_the_model_its_logits(any_model, transform)


def test_a_float32_head_says_so(build):
    model = build("qwen3")
    cast_head_to_float32(model)
    assert logit_transform(model) == LogitTransform(in_float32=True)


def test_unknown_fields_about_logits_have_no_transform(build):
    model = build("llama")
    model.config.logit_scale = 1.0
    assert logit_transform(model) == LogitTransform()
    model.config.logit_scale = 2.0
    assert logit_transform(model) is None


def test_a_head_that_is_no_plain_linear_layer_has_no_transform(build):
    model = build("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    assert logit_transform(model) is None
    assert logit_transform(nn.Linear(2, 2)) is None


ADAPTERS = {
    "elsewhere": ({"target_modules": ["q_proj"]}, LogitTransform()),
    "on the head": ({"target_modules": ["q_proj", "lm_head"], "use_rslora": True}, LogitTransform()),
    "the head as a whole": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, LogitTransform()),
    "DoRA on the head": ({"target_modules": ["lm_head"], "use_dora": True}, None),
    "biases of the adapter": ({"target_modules": ["lm_head"], "lora_bias": True}, None),
}


# The process that collects warnings of workers would import peft to show this one.
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters(build, case):
    peft = pytest.importorskip("peft")
    settings, transform = ADAPTERS[case]
    model = peft.get_peft_model(build("qwen3"), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    assert logit_transform(model) == transform


def test_an_adapter_merged_into_the_head_has_no_transform(build):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("qwen3"), peft.LoraConfig(target_modules=["lm_head"]))
    model.merge_adapter()
    assert logit_transform(model) is None


def test_the_layer_under_an_adapter_that_is_off(build):
    peft = pytest.importorskip("peft")
    for settings in ({"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}):
        base = build("qwen3")
        head = base.lm_head
        model = peft.get_peft_model(base, peft.LoraConfig(**settings))
        on = head_layer(base.lm_head)
        assert on is not None
        assert bool(on.adapters) or on.linear is not head
        with model.disable_adapter():
            off = head_layer(base.lm_head)
            assert off is not None
            assert off.linear is head
            assert off.adapters == ()


@pytest.mark.parametrize("settings", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_an_adapted_head_that_is_spread_over_ranks_has_no_transform(build, settings):
    """ZeRO-3 gathers each module when it is called, and puts an id on every parameter."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings})
    model = peft.get_peft_model(build("qwen3"), config)
    assert logit_transform(model) == LogitTransform()
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    assert logit_transform(model) is None
