"""The engine over `generate`: exact log-probs, one random stream per row, and only the requested options."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from sample_checks import assert_scores_are_the_trainers, requests
from torch import nn
from transformers import GenerationConfig

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.transformers import TransformersEngine

OPTIONS = SamplingOptions(max_new_tokens=6, eos_ids=(1,), pad_id=0)


def sample(model: nn.Module, submitted: Any = None, options: SamplingOptions = OPTIONS, **engine: Any) -> list[Sample]:
    return TransformersEngine(model, **engine).sample(submitted if submitted is not None else requests(), options)


def markov(make_model: Callable[..., Any], next_logits: dict[int, dict[int, float]], **config: Any) -> Any:
    """A model whose next token depends on the last one alone, with these logits; others are -30."""
    model = make_model(hidden_size=96, num_hidden_layers=1, **config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        size = model.config.vocab_size
        model.model.embed_tokens.weight.copy_(torch.eye(size, 96))
        head = torch.full((size, 96), -30.0)
        for last, row in next_logits.items():
            for token, logit in row.items():
                head[token, last] = logit
        model.lm_head.weight.copy_(head / 96**0.5)  # the final norm makes the hidden state sqrt(96) * one-hot
    return model.eval()


def chain(*tokens: int) -> dict[int, dict[int, float]]:
    """Logits under which each token follows the one before it."""
    return {a: {b: 30.0} for a, b in itertools.pairwise(tokens)}


# ------------------------------------------------------------------------------------------- exactness


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(num_tokens):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == 1:
            break
    return ids[0, len(prompt) :].tolist()


def test_without_chance_the_most_likely_tokens_are_taken(build):
    model = build("llama")
    expected = [greedy(model, r.prompt_ids, 6) for r in requests(4)]
    for changes in ({"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert [s.ids for s in sample(model, requests(4), replace(OPTIONS, **changes))] == expected, changes


# ------------------------------------------------------------------------------------------- one stream a row


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 3.0, "pad_id": 1},
        {"pad_id": 1, "extra": {"no_repeat_ngram_size": 1}},
        {"pad_id": 1, "extra": {"min_new_tokens": 2}},
    ],
)
def test_a_rows_text_depends_on_neither_neighbours_nor_order_nor_batch_size(changes: dict[str, Any], build):
    model, options = build("qwen3"), replace(OPTIONS, **changes)
    submitted = requests(8)
    alone = sample(model, submitted, options, max_rows=1)
    for max_rows in (3, 64):
        assert [s.ids for s in sample(model, submitted, options, max_rows=max_rows)] == [s.ids for s in alone]
    turned = sample(model, submitted[::-1], options)[::-1]
    assert [s.ids for s in turned] == [s.ids for s in alone]
    assert [s.finish_reason for s in turned] == [s.finish_reason for s in alone]


def test_padding_is_not_seen_by_the_repetition_penalty(make_model):
    """Padding with the EOS id must not count as an occurrence of the EOS."""
    model = markov(make_model, {10: {1: 3.0, 12: 2.0}, 12: {1: 30.0}})
    options = replace(OPTIONS, pad_id=1, repetition_penalty=3.0)
    short = [Request([10], i, 3) for i in range(40)]
    alone = [s.ids for s in sample(model, short, options)]
    assert [12, 1] in alone
    assert [1] in alone
    together = sample(model, [Request([20, 21, 22, 10], 99, 3), *short], options)
    assert [s.ids for s in together[1:]] == alone


def test_seeds_alone_tell_rows_of_one_prompt_apart(build):
    model = build("qwen3")
    texts = [tuple(s.ids) for s in sample(model, [Request([5, 6], seed, 6) for seed in [*range(8), 0]])]
    assert texts[8] == texts[0]
    assert len(set(texts[:8])) > 4


# ------------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.2},
        {"repetition_penalty": 2.0},
    ],
)
def test_logprobs_are_those_that_training_computes(changes: dict[str, Any], build):
    model, options = build("gemma2 (soft caps)"), replace(OPTIONS, **changes)
    samples = sample(model, requests(), options)
    assert_scores_are_the_trainers(model, requests(), samples, options)


@pytest.mark.parametrize("config_name", ["LoraConfig", "PromptTuningConfig"])
def test_adapters_sample_as_they_train(config_name: str, build):
    """Virtual tokens without cached keys and values, which releases of peft and transformers mishandle together."""
    peft = pytest.importorskip("peft")
    base = build("qwen3")
    bare = [s.ids for s in sample(copy.deepcopy(base))]
    settings = (
        {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False} if config_name == "LoraConfig" else {}
    )
    settings |= {} if config_name == "LoraConfig" else {"num_virtual_tokens": 3}
    torch.manual_seed(0)
    model = peft.get_peft_model(base, getattr(peft, config_name)(task_type="CAUSAL_LM", **settings))
    kwargs = {"use_cache": config_name == "LoraConfig"}
    samples = sample(model, **kwargs)
    assert [s.ids for s in samples] != bare
    assert_scores_are_the_trainers(model, requests(), samples, OPTIONS)
    assert [s.ids for s in sample(model, **kwargs)] == [s.ids for s in samples]


def test_a_static_cache_gives_the_same_texts(build):
    model = build("qwen3")
    actual = sample(model, options=replace(OPTIONS, cache_implementation="static"))
    assert [s.ids for s in actual] == [s.ids for s in sample(model)]


# ------------------------------------------------------------------------------------------- ends of completions


STEPS = chain(10, 11, 12, 13, 14, 15, 16, 17)
EARLY_AND_LATE = {**chain(10, 1), **chain(20, 21, 22, 23, 24, 25, 26, 27)}
ENDS: dict[str, tuple[Any, dict[str, Any], list[Any], list[Any]]] = {
    "the first EOS id": (STEPS, {"eos_ids": (13, 15)}, [([10], 6)], [([11, 12, 13], "eos")]),
    "an EOS id at once": (STEPS, {"eos_ids": (11,)}, [([10], 6)], [([11], "eos")]),
    "EOS at the last allowed token": (
        chain(10, 11, 1),
        {},
        [([10], 2), ([10], 1)],
        [([11, 1], "eos"), ([11], "length")],
    ),
    "no EOS id": (chain(10, 1, 10), {"eos_ids": ()}, [([10], 4)], [([1, 10, 1, 10], "length")]),
    "a row that ends early": (
        EARLY_AND_LATE,
        {},
        [([10], 6), ([5, 20], 6)],
        [([1], "eos"), ([21, 22, 23, 24, 25, 26], "length")],
    ),
    "a row that ends early, padded with EOS": (
        EARLY_AND_LATE,
        {"pad_id": 1},
        [([10], 6), ([5, 20], 6)],
        [([1], "eos"), ([21, 22, 23, 24, 25, 26], "length")],
    ),
    "a pad token that the policy chose": ({**chain(10, 0), **chain(0, 11, 1)}, {}, [([10], 6)], [([0, 11, 1], "eos")]),
    "min_new_tokens": (
        {t: {1: 10.0, 20: 0.0} for t in (10, 20)},
        {"extra": {"min_new_tokens": 3}},
        [([10], 6)],
        [([20, 20, 20, 1], "eos")],
    ),
    "suppress_tokens": (
        {10: {11: 9.0, 12: 5.0}, 12: {1: 9.0}},
        {"extra": {"suppress_tokens": [11]}},
        [([10], 6)] * 5,
        [([12, 1], "eos")] * 5,
    ),
}
"""Logits, options, (prompt, budget) of requests -> completions and reasons of their ends."""


@pytest.mark.parametrize("case", ENDS)
def test_ends_of_completions(case: str, make_model):
    next_logits, changes, asked, expected = ENDS[case]
    submitted = [Request(prompt, i, budget) for i, (prompt, budget) in enumerate(asked)]
    actual = sample(markov(make_model, next_logits), submitted, replace(OPTIONS, **changes))
    assert [(s.ids, s.finish_reason) for s in actual] == expected
    assert [len(s.logprobs or []) for s in actual] == [len(ids) for ids, _ in expected]


def test_every_request_has_its_own_budget(make_model):
    model = markov(make_model, chain(10, 11, 12, 13, 14, 15, 16, 17))
    submitted = [Request([10], i, budget) for i, budget in enumerate((3, 1, 5, 3, 2))]
    actual = sample(model, submitted, replace(OPTIONS, max_new_tokens=6))
    assert [len(s.ids) for s in actual] == [3, 1, 5, 3, 2]
    assert all(s.finish_reason == "length" for s in actual)


def test_nothing_asked_nothing_sampled(build):
    assert sample(build("qwen3"), []) == []


# ------------------------------------------------------------------------------------------- further options


def test_extra_options_win_over_the_fields(make_model):
    model = markov(make_model, {10: {11: 1.0, 12: 0.0}})
    submitted = [Request([10], i, 1) for i in range(30)]
    options = replace(OPTIONS, temperature=5.0, extra={"temperature": 0.01})
    actual = sample(model, submitted, options)
    assert {tuple(s.ids) for s in actual} == {(11,)}
    assert actual[0].logprobs == pytest.approx([0.0], abs=1e-6)
    assert {tuple(s.ids) for s in sample(model, submitted, replace(OPTIONS, extra={"top_k": 1}))} == {(11,)}


def letters(tokenizer: Any, text: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(character) for character in text]


@pytest.mark.parametrize("stops", ["cd", ["zz", "cd"], ["d"]])
def test_stop_strings_end_a_text_and_stay_in_it(stops: Any, make_model, tokenizer):
    model = markov(make_model, chain(*letters(tokenizer, "abcdefgh")))
    options = replace(OPTIONS, extra={"stop_strings": stops})
    prompts = [letters(tokenizer, "a"), letters(tokenizer, "xxe")]
    actual = sample(model, [Request(p, i, 4) for i, p in enumerate(prompts)], options, tokenizer=tokenizer)
    assert [tokenizer.decode(s.ids) for s in actual] == ["bcd", "fgh" + tokenizer.decode(actual[1].ids[3:])]
    assert [s.finish_reason for s in actual] == ["eos", "length"]
    assert [len(s.logprobs or []) for s in actual] == [3, 4]


@pytest.mark.parametrize("extra", [{}, {"do_sample": False}])
def test_a_stop_string_counts_only_within_the_completion(extra: dict[str, Any], make_model, tokenizer):
    """`bc` spans prompt and completion, `ab` is in the prompt: neither ends the completion."""
    model = markov(make_model, chain(*letters(tokenizer, "abcdefgh")))
    options = replace(OPTIONS, extra={"stop_strings": ["bc", "ab"], **extra})
    actual = sample(model, [Request(letters(tokenizer, "ab"), 0, 4)], options, tokenizer=tokenizer)[0]
    assert tokenizer.decode(actual.ids) == "cdef"
    assert actual.finish_reason == "length"


def test_an_eos_before_the_stop_string(make_model, tokenizer):
    a, b, c = letters(tokenizer, "abc")
    model = markov(make_model, chain(a, b, 1, c))
    options = replace(OPTIONS, extra={"stop_strings": ["c"]})
    actual = sample(model, [Request([a], 0, 5)], options, tokenizer=tokenizer)[0]
    assert (actual.ids, actual.finish_reason) == ([b, 1], "eos")


def test_beam_search_is_generates_own(build):
    model = build("qwen3")
    options = replace(OPTIONS, extra={"num_beams": 3, "do_sample": False})
    config = GenerationConfig(num_beams=3, do_sample=False, max_new_tokens=6, eos_token_id=1, pad_token_id=0)
    for request in requests(3):
        actual = sample(model, [request], options)[0]
        ids = torch.tensor([request.prompt_ids])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        expected = output[0, ids.shape[1] :].tolist()
        assert actual.ids == (expected[: expected.index(1) + 1] if 1 in expected else expected)
        assert actual.logprobs is None


# ------------------------------------------------------------------------------------------- state of the model


def test_the_models_own_generation_config_plays_no_part(build):
    model = build("qwen3")
    expected = sample(model)
    own = GenerationConfig(
        temperature=0.1,
        top_k=1,
        top_p=0.1,
        repetition_penalty=5.0,
        do_sample=True,
        max_new_tokens=1,
        eos_token_id=expected[0].ids[0],
        suppress_tokens=[expected[1].ids[0]],
        no_repeat_ngram_size=1,
        num_beams=2,
    )
    model.generation_config = own
    before = own.to_dict()
    actual = sample(model)
    assert [(s.ids, s.finish_reason) for s in actual] == [(s.ids, s.finish_reason) for s in expected]
    assert model.generation_config is own
    assert own.to_dict() == before


def test_everything_is_put_back_after_an_error(build):
    model = build("qwen3").train()
    own = model.generation_config
    with pytest.raises(Exception, match=r"index|range"):
        sample(model, [Request([999], 0, 4)])
    assert model.generation_config is own
    assert not model._forward_hooks
    assert all(module.training for module in model.modules())


def test_gradient_checkpointing_does_not_matter_and_stays_on(build):
    model = build("qwen3")
    expected = sample(model)
    model.gradient_checkpointing_enable()
    model.train()
    assert [s.ids for s in sample(model)] == [s.ids for s in expected]
    assert model.is_gradient_checkpointing


def test_a_model_that_goes_past_the_hook_is_sampled_without_logprobs(build):
    """Without the model's logits, log-probs are None and training computes its own."""
    model = build("llama")
    expected = TransformersEngine(model).sample([Request([5, 6], 3, 4), Request([7], 4, 4)], SamplingOptions(4))

    class Uncalled(type(model)):
        def __call__(self, *args, **kwargs):
            return self.forward(*args, **kwargs)

    model.__class__ = Uncalled
    actual = TransformersEngine(model).sample([Request([5, 6], 3, 4), Request([7], 4, 4)], SamplingOptions(4))
    assert [sample.ids for sample in actual] == [sample.ids for sample in expected]
    assert [sample.logprobs for sample in actual] == [None, None]
    assert all(sample.logprobs for sample in expected)


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_switches_itself_is_switched_and_left_as_it_was(build, fails):
    model = build("llama").train()
    model.model.layers[0].eval()
    model.model.gradient_checkpointing = True
    before = [(module.training, vars(module).get("gradient_checkpointing")) for module in model.modules()]
    calls = []

    def switch(training):
        calls.append("training" if training else "inference")
        for module in model.modules():
            module.training = training
            if "gradient_checkpointing" in vars(module):
                module.gradient_checkpointing = training

    model.for_inference, model.for_training = lambda: switch(False), lambda: switch(True)
    engine = TransformersEngine(model)

    def check_mode(*_):
        calls.append(model.model.gradient_checkpointing)
        if fails:
            raise ZeroDivisionError

    model.register_forward_pre_hook(check_mode)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        engine.sample([Request([5, 6], 3, 4)], SamplingOptions(4))
    assert calls == ["inference", *[False] * (1 if fails else 4), "training"]
    after = [(module.training, vars(module).get("gradient_checkpointing")) for module in model.modules()]
    assert after == before
