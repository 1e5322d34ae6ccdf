"""The selection of an engine, its reason and its warnings."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import peft
import pytest
import transformers
from mixed_tokens import mixing
from noted_calls import note_calls

from groupgrad.engines import selection
from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native.cpp_step import CompiledStep
from groupgrad.engines.native.direct_step import DirectModel
from groupgrad.engines.selection import EngineOptions, choose_engine, replaces_generate
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.errors import ConfigError
from groupgrad.kernels import fallbacks, library, status
from groupgrad.scoring.forward import ForwardOptions
from groupgrad.scoring.self_check import check_layout

OPTIONS = SamplingOptions(max_new_tokens=4)


def test_architectures_that_cannot_be_driven_are_sampled_by_generate(build):
    model = build("xglm (own attention)")
    chosen = choose_engine(model, EngineOptions(), OPTIONS)
    reason = "its attention does not go through transformers' attention interface"
    assert (chosen.name, chosen.reason) == ("transformers", reason)
    with pytest.raises(ConfigError, match=rf"rollout_engine='native' cannot be used for XGLMForCausalLM: {reason}"):
        choose_engine(model, EngineOptions(engine="native"), OPTIONS)


def test_a_class_that_overrides_generate_counts_too(build):
    model = build("llama")

    class Accelerated(type(model)):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)

    model.__class__ = Accelerated
    assert replaces_generate(model)


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_an_adapter_does_not_bring_its_own(build, task_type):
    from peft import LoraConfig, get_peft_model

    config: Any = LoraConfig(r=2, target_modules=["q_proj"], task_type=task_type)
    model = get_peft_model(build("llama"), config)
    assert not replaces_generate(model)
    assert choose_engine(model, EngineOptions(), OPTIONS).name == "native"
    model.get_base_model().generate = lambda *args, **kwargs: None
    assert replaces_generate(model)


def test_other_numbers_than_a_plain_pass_fall_back_in_one_line(build, caplog):
    model = mixing(build("llama"))
    with caplog.at_level(logging.WARNING):
        chosen = choose_engine(model, EngineOptions(), OPTIONS)
    assert chosen.name == "transformers"
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3
    assert texts[0].startswith("LlamaForCausalLM is sampled by generate: its log-probs differ by ")
    assert texts[1].startswith("LlamaForCausalLM is given prompts of one length at a time")
    # A step with cached keys has no neighbouring hidden state.
    assert texts[2].startswith("generate computes every token of LlamaForCausalLM from the whole text, which is slower")
    assert not any("\n" in text for text in texts)
    assert chosen.gap is not None
    assert chosen.gap < 1e-5


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("problem", ["its log-probs differ by", "sampling random tokens failed: RuntimeError: no"])
def test_a_direct_form_that_differs_or_fails_leaves_the_native_engine_its_modules(
    build, is_compiled, problem, monkeypatch, caplog
):
    if is_compiled and library() is None:
        pytest.skip(status())
    monkeypatch.setenv("GROUPGRAD_NATIVE_KERNELS", "1" if is_compiled else "0")
    form = CompiledStep if is_compiled else DirectModel
    compute = form.__call__

    def wrong(self, tokens, positions, *others):
        if "failed" in problem:
            raise RuntimeError("no")
        return compute(self, tokens, positions + 1, *others)

    monkeypatch.setattr(fallbacks, "_found", {})
    monkeypatch.setattr(form, "__call__", wrong)
    monkeypatch.setattr(CompiledStep, "sample", lambda self, tokens, positions, *_: wrong(self, tokens, positions))
    with caplog.at_level(logging.WARNING):
        chosen = choose_engine(build("llama"), EngineOptions(), OPTIONS)
    assert (chosen.name, chosen.engine.path.split(";")[0]) == ("native", "modules")
    assert chosen.gap is not None and chosen.gap < 1e-5
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith(f"decode steps run through the model's modules, which is slower: {problem}")


@pytest.mark.parametrize("gap", [0.5, 2.0])
def test_a_gap_of_whole_nats_that_stays_is_an_error(build, gap, monkeypatch, caplog):
    from peft import LoraConfig, get_peft_model

    plain = TransformersEngine.sample

    def sample(self, requests, options):
        samples = plain(self, requests, options)
        return [replace(found, logprobs=[value - gap for value in found.logprobs]) for found in samples]

    monkeypatch.setattr(TransformersEngine, "sample", sample)
    model = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    asked = EngineOptions(engine="transformers")
    if gap > 1:
        libraries = rf"\(transformers {transformers.__version__}, peft {peft.__version__}\)"
        with pytest.raises(ConfigError, match=rf"differ by 2 nats .* kept or not {libraries}, so it would learn from"):
            choose_engine(model, asked, OPTIONS)
        return
    with caplog.at_level(logging.WARNING):
        assert choose_engine(model, asked, OPTIONS).gap == pytest.approx(0.5, abs=1e-4)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("generate does not sample LlamaForCausalLM as it is trained: its log-probs differ by 0.5 ")
    assert text.endswith("sampling/logp_mismatch in the log is by how much")


@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_a_model_that_padding_on_the_left_disturbs_gets_prompts_of_one_length(engine, build, caplog):
    """RecurrentGemma's state includes left padding; its completions must not depend on longer prompts in a call."""
    model = build("recurrent gemma (own recurrence)")
    with caplog.at_level(logging.WARNING):
        chosen = choose_engine(model, EngineOptions(engine=engine), OPTIONS)
    warnings = [
        record.getMessage() for record in caplog.records if "given prompts of one length" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith("RecurrentGemmaForCausalLM is given prompts of one length at a time")
    requests = [Request(list(range(3, 3 + length)), seed=length, max_new_tokens=4) for length in (3, 8, 8, 5)]
    together = chosen.engine.sample(requests, OPTIONS)
    for request, sample in zip(requests, together):
        (alone,) = chosen.engine.sample([request], OPTIONS)
        assert alone.ids == sample.ids
        assert alone.logprobs == pytest.approx(sample.logprobs, abs=1e-5)
    padded = TransformersEngine(model).sample(requests, OPTIONS)
    assert max(abs(a - b) for a, b in zip(padded[0].logprobs or (), together[0].logprobs or ())) > 0.1


@pytest.mark.parametrize("name", ["mamba (recurrent)", "mamba2 (recurrent)", "qwen3.5 (linear attention)"])
def test_recurrent_models_that_heed_the_mask_share_a_call(build, name, monkeypatch):
    chosen = choose_engine(build(name), EngineOptions(engine="transformers"), OPTIONS)
    model = chosen.engine._model  # pyright: ignore[reportAttributeAccessIssue]
    calls = note_calls(monkeypatch, model, "generate", lambda ids, **options: len(ids))
    chosen.engine.sample([Request(list(range(3, 3 + n)), seed=n, max_new_tokens=4) for n in (3, 8, 5)], OPTIONS)
    assert calls == [3]


def test_a_model_that_fails_on_flat_tokens_falls_back(build, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(selection.NativeEngine, "sample", fail)
    chosen = choose_engine(build("llama"), EngineOptions(), OPTIONS)
    assert (chosen.name, chosen.reason) == ("transformers", "sampling random tokens failed: RuntimeError: no")


def test_a_model_that_a_device_map_placed_is_sampled_natively(build):
    """Every module has hooks that move its inputs and outputs, as on several devices."""
    from accelerate import dispatch_model

    model = build("llama")
    parts = {name: "cpu" for name, module in model.named_modules() if name and not list(module.children())}
    dispatch_model(model, device_map=parts, force_hooks=True)
    assert hasattr(model.lm_head, "_hf_hook")
    report = check_layout(model, ForwardOptions())
    assert (report.layout, report.tiled_head) == ("shared", True)
    assert choose_engine(model, EngineOptions(engine="native"), OPTIONS).name == "native"


def test_every_fallback_is_one_warning_with_its_reason(build, caplog):
    sampling = SamplingOptions(max_new_tokens=4, extra={"no_repeat_ngram_size": 2})
    choose_engine(build("qwen3"), EngineOptions(kv_memory=1 << 30), sampling)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "Qwen3ForCausalLM is sampled by generate: the native engine has no no_repeat_ngram_size, which "
        "rollout_engine='transformers' has",
        "engine_kv_memory: no effect, it is the native engine's",
    ]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_the_whole_call_are_left_to_generate(build, rope_type):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    rope = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": 2.0,
        **(factors if rope_type == "longrope" else {}),
    }
    chosen = choose_engine(build("llama", rope_parameters=rope), EngineOptions(), OPTIONS)
    assert (chosen.name, chosen.reason) == (
        "transformers",
        f"its {rope_type} rotary positions depend on the longest row of a call",
    )
