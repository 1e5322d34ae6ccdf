"""The native engine: the tokens of `generate` and of the transformers engine, and the log-probs of training."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import base_fixtures
import known_decoders
import pytest
import sample_checks
import torch
from base_fixtures import ARCHITECTURES
from sample_checks import PROMPTS, assert_same_samples, assert_scores_are_the_trainers
from torch import nn
from transformers import GenerationConfig

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.scoring.attention import flat_obstacle

OPTIONS = SamplingOptions(max_new_tokens=10, eos_ids=(1,), pad_id=0)
requests = partial(sample_checks.requests, budget=10)
GREEDY = replace(OPTIONS, extra={"do_sample": False})
SIZES: dict[str, Any] = {**known_decoders.SIZES, "head_dim": 4}
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
OWN_ATTENTION = ["bloom (alibi)", "falcon", "falcon (alibi)", "gpt-neo (local attention)", "mpt (alibi)"]
OWN_ATTENTION += ["xglm (own attention)", "recurrent gemma (own recurrence)"]
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", SIZES),
    "phi3": ("Phi3", {**SIZES, "original_max_position_embeddings": 64}),
    "olmo2": ("Olmo2", SIZES),
    "smollm3": ("SmolLM3", SIZES),
    "gemma3": ("Gemma3Text", {**SIZES, **WINDOWED, "query_pre_attn_scalar": 4}),
    "gpt-neox": ("GPTNeoX", SIZES),
}
"""Families beside those that all tests share."""


def generated(model: nn.Module, request: Request) -> list[int]:
    """Greedy completion of one row by `generate`, with its EOS."""
    config = GenerationConfig(max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=1, pad_token_id=0)
    ids = torch.tensor([request.prompt_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)  # pyright: ignore
    return output[0, len(request.prompt_ids) :].tolist()


# ------------------------------------------------------------------------------------------- models


@pytest.mark.quick("qwen3", "gemma2 (soft caps)", "gpt2", "gpt-oss (experts, sinks)", *OWN_ATTENTION)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *MORE])
def test_greedy_equals_generate_and_sampling_the_other_engine(name: str, monkeypatch):
    monkeypatch.setattr(base_fixtures, "ARCHITECTURES", {**ARCHITECTURES, **MORE})
    model = base_fixtures.build(name)
    # Padding on the left changes its states in `generate`, and `choose_engine` finds that out.
    other = TransformersEngine(model, equal_lengths=name.startswith("recurrent gemma"))
    engine: Any = NativeEngine(model)
    if flat_obstacle(model) is not None:
        with pytest.raises(ValueError, match="cannot run under an attention layout"):
            engine.sample(requests(), OPTIONS)
        engine = other
    greedy, options = engine.sample(requests(), GREEDY), replace(OPTIONS, temperature=0.7)
    expected = [generated(model, r) for r in requests(len(PROMPTS))]
    assert [s.ids for s in greedy] == expected * 3
    actual = engine.sample(requests(), options)
    assert_scores_are_the_trainers(model, requests(), actual, options)
    if engine is not other:
        assert_same_samples(actual, other.sample(requests(), options))
        assert_scores_are_the_trainers(model, requests(), greedy, GREEDY)


def test_adapters_are_sampled_without_merging(build):
    peft = pytest.importorskip("peft")
    base = build("qwen3")
    bare = NativeEngine(copy.deepcopy(base)).sample(requests(), OPTIONS)
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    actual = NativeEngine(model).sample(requests(), OPTIONS)
    assert [s.ids for s in actual] != [s.ids for s in bare]
    assert_same_samples(actual, TransformersEngine(model).sample(requests(), OPTIONS))
    assert_scores_are_the_trainers(model, requests(), actual, OPTIONS)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with model.disable_adapter():
        assert_same_samples(NativeEngine(model).sample(requests(), OPTIONS), bare)


def test_bfloat16_follows_the_trainer(build):
    model = build("qwen3").to(torch.bfloat16)
    actual = NativeEngine(model).sample(requests(), OPTIONS)
    for request, sample in zip(requests(), actual):
        ids = torch.tensor([[*request.prompt_ids, *sample.ids]])
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0.0, atol=0.3)


def test_mixed_precision_is_that_of_training(build):
    model = build("qwen3")
    plain = NativeEngine(model).sample(requests(), OPTIONS)
    half = NativeEngine(model, precision=lambda: torch.autocast("cpu", torch.bfloat16)).sample(requests(), OPTIONS)
    differences = [abs(a - b) for p, h in zip(plain, half) for a, b in zip(p.logprobs[:1], h.logprobs[:1])]
    assert 1e-4 < max(differences) < 1.0


# ------------------------------------------------------------------------------------------- one stream per row


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"repetition_penalty": 3.0}])
def test_a_rows_text_depends_on_neither_neighbours_nor_order_nor_batch_size(changes: dict[str, Any], build):
    model, options = build("qwen3"), replace(OPTIONS, **changes)
    submitted = [Request(PROMPTS[i % 4], i, 3 + i) for i in range(8)]
    alone = [NativeEngine(model).sample([request], options)[0] for request in submitted]
    for max_rows in (1, 5, None):
        assert_same_samples(NativeEngine(model, max_rows=max_rows).sample(submitted, options), alone)
    assert_same_samples(NativeEngine(model).sample(submitted[::-1], options)[::-1], alone)


@pytest.mark.parametrize(
    ("kind", "extra"), [(NativeEngine, {}), (TransformersEngine, {}), (TransformersEngine, {"num_beams": 2})]
)
def test_sampling_leaves_the_global_random_stream_alone(kind: Any, extra: dict[str, Any], build):
    model = build("qwen3")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    kind(model).sample(requests(), replace(OPTIONS, extra=extra))
    assert torch.equal(torch.rand(2), expected)


# ------------------------------------------------------------------------------------------- state of the model


@pytest.mark.parametrize("kind", [NativeEngine, TransformersEngine])
def test_a_training_model_samples_without_dropout_and_goes_on_training(kind: Any, build):
    model = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    expected = kind(model).sample(requests(), OPTIONS)
    model.train()
    model.transformer.h[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert kind(model).sample(requests(), OPTIONS) == expected
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_everything_is_put_back_after_an_error(build):
    model = build("qwen3").train()
    with pytest.raises(Exception, match=r"index|range"):
        NativeEngine(model).sample([Request([5, 999], 0, 4)], OPTIONS)
    assert all(module.training for module in model.modules())
    assert not any("forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules())
    loss = model(torch.tensor([[5, 6]])).logits.sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_prompts_are_computed_once_and_nothing_asked_is_nothing_sampled(build):
    engine = NativeEngine(build("qwen3"))
    actual = engine.sample(requests(40), replace(OPTIONS, eos_ids=()))
    assert {len(s.ids) for s in actual} == {10}
    assert engine.statistics.num_prefilled == sum(map(len, PROMPTS))
    assert (engine.statistics.num_steps, engine.statistics.num_decoded) == (9, 9 * 40)
    assert engine.sample([], OPTIONS) == []
    assert engine.is_exact
