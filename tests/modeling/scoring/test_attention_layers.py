"""Families that compute attention themselves run the shared layout and the native engine, and get their own numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ragged_rows import assert_scored_as_one_pass_a_row, batch_of, gradients
from tiny_own_attention import CONFIGS, make_own_attention
from transformers import GenerationConfig

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.native.engine import NativeEngine
from groupgrad.engines.selection import EngineOptions, choose_engine
from groupgrad.kernels import library
from groupgrad.modeling.scoring import attention_layers
from groupgrad.modeling.scoring.attention import plannable, unplug
from groupgrad.modeling.scoring.forward import ForwardOptions, build_batch, score_tokens
from groupgrad.modeling.self_check import check_layout

OPTIONS = ForwardOptions(layout="shared")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
FEW = ["gpt_neo", "bloom", "mpt", "falcon, alibi"]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_and_gradients_are_those_of_one_pass_a_row(family: str, seed: int, row_logits: Any) -> None:
    assert_scored_as_one_pass_a_row(make_own_attention(family), batch_of(seed), row_logits)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_start_up_check_takes_the_shared_layout(family: str) -> None:
    model = make_own_attention(family)
    report = check_layout(model, ForwardOptions())
    assert (report.layout, report.tiled_head, report.reason) == ("shared", True, None)
    assert report.difference is not None and report.difference < 1e-4
    report = check_layout(model, ForwardOptions(), partial(torch.autocast, "cpu", torch.bfloat16))
    assert (report.layout, report.reason) == ("shared", None)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_shared_layout_is_taken_in_bfloat16_too(family: str) -> None:
    report = check_layout(make_own_attention(family).bfloat16(), ForwardOptions())
    assert (report.layout, report.reason) == ("shared", None)


@pytest.mark.parametrize("family", FEW)
def test_layers_that_are_computed_again_get_the_plan_of_their_pass(family: str) -> None:
    """Between the forward and the backward pass the model computes a row of its own."""
    batch, results, ids = batch_of(2), [], torch.arange(3, 20)[None]
    weights = torch.linspace(-1, 2, batch.num_tokens)
    for checkpointing in (False, True):
        model = make_own_attention(family).train()
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = (weights * score_tokens(model, batch, OPTIONS).logprobs).sum()
        with torch.no_grad():
            between = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(between, expected, rtol=0, atol=1e-5)
        results.append(gradients(model, loss))
        unplug(model)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-6, msg=name)


def sampled_logprobs(samples: list[Sample]) -> torch.Tensor:
    return torch.tensor([value for sample in samples for value in sample.logprobs or ()])


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_text_is_that_of_generate(family: str) -> None:
    model = make_own_attention(family)
    requests = [Request(prompt, row, 12) for row, prompt in enumerate(PROMPTS)]
    samples = NativeEngine(model).sample(requests, SamplingOptions(max_new_tokens=12, top_k=1, eos_ids=(1,)))
    for prompt, sample in zip(PROMPTS, samples):
        settings = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
        generated = model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :]
        assert sample.ids == generated.tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_of_sampling_are_those_of_training(family: str) -> None:
    model = make_own_attention(family)
    requests = [Request(prompt, 10 * i + row, 12) for i, prompt in enumerate(PROMPTS) for row in range(4)]
    samples = NativeEngine(model).sample(requests, SamplingOptions(max_new_tokens=12))
    completions = [sample.ids for sample in samples]
    assert len({tuple(ids) for ids in completions}) > 6
    rows = [i for i in range(len(PROMPTS)) for _ in range(4)]
    for layout in ("dense", "shared"):
        batch = build_batch(PROMPTS, rows, completions)
        trained = score_tokens(model, batch, ForwardOptions(layout=layout)).logprobs.detach()
        torch.testing.assert_close(sampled_logprobs(samples), trained, rtol=0, atol=1e-5)


@pytest.mark.skipif(library() is None, reason="the kernels are not compiled")
@pytest.mark.parametrize("family", FEW)
def test_attention_runs_in_the_compiled_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of heads with a bias have one width, as the kernels ask for."""
    widths: list[tuple[int, int]] = []
    plain = attention_layers.PlanMask.attend

    def noted(self: Any, query: Any, key: Any, value: Any, call: Any) -> Any:
        widths.append((key.shape[-1], value.shape[-1]))
        return plain(self, query, key, value, call)

    monkeypatch.setattr(attention_layers.PlanMask, "attend", noted)
    score_tokens(make_own_attention(family), batch_of(1), OPTIONS)
    assert widths and all(key == value for key, value in widths)


def test_what_cannot_be_routed_says_why() -> None:
    eager = make_own_attention("falcon, alibi", attn_implementation="eager")
    reason = "its eager attention adds the bias of alibi twice; attn_implementation='sdpa' adds it once"
    assert plannable(eager) == reason
    assert plannable(make_own_attention("falcon", attn_implementation="eager")) is None
    split = make_own_attention("bloom")
    split.config.slow_but_exact, split.config.pretraining_tp = True, 2
    assert plannable(split) == "its slow_but_exact splits the products of its layers"
    report = check_layout(eager, ForwardOptions())
    assert (report.layout, report.reason) == ("dense", reason)


@pytest.mark.parametrize("name", ["codegen", "gpt-j (head bias)"])
def test_a_family_that_has_moved_to_the_interface_runs_all_fast_paths(name: str, build: Any) -> None:
    """Releases of transformers in which GPT-J and CodeGen compute attention in a method of their own run them dense."""
    model = build(name)
    assert attention_layers.routed_classes(model) == []
    has_moved = not hasattr(type(model.transformer.h[0].attn), "_attn")
    assert (plannable(model) is None) == has_moved
    report, engine = check_layout(model, ForwardOptions()), choose_engine(model, EngineOptions(), SamplingOptions(5))
    assert (report.layout, engine.name) == (("shared", "native") if has_moved else ("dense", "transformers"))


def test_a_route_whose_method_is_gone_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_own_attention("gpt_neo")
    monkeypatch.delattr(type(model.transformer.h[0].attn.attention), "_attn")
    assert attention_layers.routed_classes(model) == []
    assert plannable(model) == "its attention does not go through transformers' attention interface"


def test_dropout_of_attention_weights_is_known() -> None:
    """The shared layout does not draw it, so a model that trains with it goes dense."""
    from groupgrad.modeling.scoring.attention import attention_dropout

    for family, where in (("gpt_neo", "attn_dropout"), ("bloom", "attention_dropout")):
        model = make_own_attention(family)
        assert attention_dropout(model) == 0.0
        next(module for name, module in model.named_modules() if name.endswith(where)).p = 0.2
        assert attention_dropout(model) == 0.2
