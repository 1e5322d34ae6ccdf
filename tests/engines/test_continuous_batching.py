"""The engine over transformers' continuous batching: its samples, and the model as it was afterwards."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import peft
import pytest
import tiny_vlms
import torch

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.continuous_batching import ContinuousBatchingEngine
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.selection import EngineOptions, choose_engine
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.errors import ConfigError
from groupgrad.kernels import library, status
from groupgrad.models.load import cast_head_to_float32

PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [12, 16])
OPTIONS = SamplingOptions(max_new_tokens=6, eos_ids=(1, 2, 3), pad_id=0)
HALF = partial(torch.autocast, "cpu", torch.bfloat16)


def requests(num_rows: int = 8, seed: int = 1000) -> list[Request]:
    return [Request(PROMPTS[i % 4], seed + i, 2 + i % 5) for i in range(num_rows)]


def test_the_likeliest_tokens_are_those_of_the_other_engines(build):
    """Rows keep their order and their budgets, whichever ends first; a cut leaves log-probs unknown."""
    model, options = build("qwen3"), replace(OPTIONS, top_k=1)
    samples = ContinuousBatchingEngine(model, {}).sample(requests(), options)
    assert [s.logprobs for s in samples] == [None] * 8
    for engine in (NativeEngine(model), TransformersEngine(model)):
        expected = engine.sample(requests(), options)
        assert [(s.ids, s.finish_reason) for s in samples] == [(s.ids, s.finish_reason) for s in expected]


def test_samples_follow_the_first_seed_and_have_the_models_log_probs(build):
    model = build("qwen3")
    engine, options = ContinuousBatchingEngine(model, {"page_size": 8}), replace(OPTIONS, temperature=0.7)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    samples = engine.sample(requests(), options)
    assert torch.equal(torch.get_rng_state(), state)
    assert engine.sample(requests(), options) == samples
    assert [s.ids for s in engine.sample(requests(seed=7), options)] != [s.ids for s in samples]
    for request, sample in zip(requests(), samples):
        ids = torch.tensor([request.prompt_ids + sample.ids])
        logprobs = torch.log_softmax(model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / 0.7, dim=-1)
        expected = logprobs.gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["own", "tied", "float32"])
def test_the_model_is_as_it_was_after_sampling_in_half_precision(build, head):
    """The weights are the same objects with the same values, ready to train; inside they are bfloat16 ones."""
    model = build("qwen3-tied" if head == "tied" else "qwen3").train()
    if head == "float32":
        cast_head_to_float32(model)
    model.set_attn_implementation("eager")
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda layer, inputs: seen.append(
            (inputs[0].dtype, model.lm_head.weight.dtype, layer.training, model.config._attn_implementation)
        )
    )
    ContinuousBatchingEngine(model, {}, precision=HALF).sample(requests(), OPTIONS)
    of_head = torch.float32 if head == "float32" else torch.bfloat16
    assert set(seen) == {(torch.bfloat16, of_head, False, "paged|eager")}
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (parameter, value) in before.items():
        assert after[name] is parameter and parameter.requires_grad
        assert parameter.dtype == value.dtype and torch.equal(parameter, value)
    assert model.config._attn_implementation == "eager"
    assert model.training and all(module.training for module in model.modules())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is (head == "tied")


def test_a_request_that_fails_is_an_error_and_leaves_the_model_as_it_was(build, monkeypatch):
    model = build("qwen3")
    weight, forward = model.lm_head.weight, type(model).forward

    def fail(self, *args, **kwargs):
        raise FloatingPointError("out of tune")

    monkeypatch.setattr(type(model), "forward", fail)
    engine = ContinuousBatchingEngine(model, {}, precision=HALF)
    with pytest.raises(RuntimeError, match=r"continuous batching failed \(out of tune\); transformers_continuous"):
        engine.sample(requests(), OPTIONS)
    monkeypatch.setattr(type(model), "forward", forward)
    assert model.lm_head.weight is weight
    assert len(engine.sample(requests(), OPTIONS)) == 8


def test_a_cache_for_a_part_of_the_rows_samples_them_in_turn(build):
    model, options = build("qwen3"), replace(OPTIONS, top_k=1)
    small = ContinuousBatchingEngine(model, {"page_size": 4, "num_blocks": 8, "max_batch_tokens": 16})
    expected = NativeEngine(model).sample(requests(), options)
    assert [s.ids for s in small.sample(requests(), options)] == [s.ids for s in expected]


def test_an_adapter_takes_part(build):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, options = peft.get_peft_model(build("qwen3"), config), replace(OPTIONS, top_k=1)
    chosen = choose_engine(model, EngineOptions(continuous_batching={}), options)
    assert chosen.name == "continuous batching"
    ids = [s.ids for s in chosen.engine.sample(requests(), options)]
    assert ids == [s.ids for s in NativeEngine(model).sample(requests(), options)]
    with model.disable_adapter():
        assert ids != [s.ids for s in NativeEngine(model).sample(requests(), options)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba (recurrent)", "sampling random tokens failed"),
        ("virtual tokens", "log-probs differ by"),
        ("images", "it takes no images"),
    ],
)
def test_a_model_that_it_samples_wrongly_is_refused(build, name, reason):
    if name == "images":
        model = tiny_vlms.build(tiny_vlms.NAMES[0]).model
    elif name == "virtual tokens":
        model = build("qwen3")
        model = peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    else:
        model = build(name)
    with pytest.raises(ConfigError, match=f"use_transformers_continuous_batching=True does not work .*{reason}"):
        choose_engine(model, EngineOptions(continuous_batching={}), OPTIONS)


@pytest.mark.skipif(library() is None, reason=status())
@pytest.mark.parametrize("engine", ["transformers", "continuous batching"])
def test_a_decoder_in_bfloat16_is_sampled_as_it_is_trained(build, engine, caplog):
    """In float32 on a CPU, whichever engine samples."""
    model = build("qwen3").bfloat16()
    weight = model.lm_head.weight
    options = {"transformers": {"engine": "transformers"}, "continuous batching": {"continuous_batching": {}}}[engine]
    chosen = choose_engine(model, EngineOptions(**options), OPTIONS)
    assert chosen.gap is not None and chosen.gap < 1e-4
    assert not caplog.records
    assert model.lm_head.weight is weight and weight.dtype == torch.bfloat16
