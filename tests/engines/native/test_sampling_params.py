"""Sampling options of the native engine: exact distributions, ends of completions, and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sample_checks import PROMPTS, assert_same_samples, requests

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.native import NativeEngine, unsupported
from groupgrad.engines.native.sampler import BLOCK, Sampler
from groupgrad.engines.native.sampling_params import read_options
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.errors import ConfigError

OPTIONS = SamplingOptions(max_new_tokens=6, eos_ids=(1,), pad_id=0)


def sample(model: Any, submitted: list[Request], tokenizer: Any = None, **changes: Any) -> list[Sample]:
    return NativeEngine(model, tokenizer=tokenizer).sample(submitted, replace(OPTIONS, **changes))


def texts(samples: list[Sample]) -> list[tuple[list[int], str]]:
    return [(s.ids, s.finish_reason) for s in samples]


# ------------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("size", [5, BLOCK, 3 * BLOCK + 7])
def test_draws_invert_the_cumulative_distribution(size: int):
    """Against float64 sums over the whole vocabulary, without draws within 1e-6 of a border."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(400, size)
    params = read_options(replace(OPTIONS, temperature=0.6), None)
    submitted = [Request([3], seed, 1) for seed in range(400)]
    sampler = Sampler(params, torch.device("cpu"))
    rows = torch.tensor(sampler.add(submitted))
    tokens = sampler.choose(logits.clone(), rows, torch.zeros_like(rows))
    p = (logits.double() / 0.6).softmax(-1)
    cumulative = p.cumsum(-1)
    draws = torch.stack(
        [torch.rand(1, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(400)]
    )
    expected = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    is_clear = (cumulative - draws).abs().min(-1).values > 1e-6
    assert is_clear.sum() > 350
    assert torch.equal(tokens[is_clear], expected.squeeze(-1)[is_clear])
    logprobs = p.log().gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(sampler.logprobs[:, 0].double(), logprobs, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(sampler.entropies[:, 0].double(), -(p * p.log()).sum(-1), rtol=2e-6, atol=2e-6)


def test_a_row_of_the_tables_that_is_used_again_penalises_its_new_request_alone():
    """A penalty of 2 halves the first request's 3.0; the second has token 4 alone in its prompt and takes token 3."""
    logits, first = torch.tensor([[0.0, 1.0, 2.0, 3.0, 2.5, 0.0]]), torch.zeros(1, dtype=torch.int64)
    params = read_options(replace(OPTIONS, repetition_penalty=2.0, extra={"do_sample": False}), None)
    sampler = Sampler(params, torch.device("cpu"))
    for prompt_ids, expected in (([3], 4), ([4], 3)):
        rows = sampler.add([Request(prompt_ids, 0, 1)])
        assert rows == [0]
        assert sampler.choose(logits, torch.tensor(rows), first).tolist() == [expected]
        sampler.take_out(rows, [1])


def test_tokens_without_probability_are_never_drawn():
    """The draws 0 and almost 1 fall on the first and the last token that has any."""
    logits = torch.full((2, 2 * BLOCK), float("-inf"))
    logits[:, [3, BLOCK + 5]] = 0.0
    sampler = Sampler(read_options(OPTIONS, None), torch.device("cpu"))
    sampler.add([Request([3], 0, 1)] * 2)
    sampler._draws[:, 0] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens = sampler.choose(logits, torch.arange(2), torch.zeros(2, dtype=torch.int64))
    assert tokens.tolist() == [3, BLOCK + 5]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7, "top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 2.0, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"eos_ids": tuple(range(1, 20)), "extra": {"min_new_tokens": 3}},
        {"extra": {"suppress_tokens": [5, 6, 7, 8, 9, 30, 31]}},
        {"extra": {"begin_suppress_tokens": [5, 6, 7, 8, 9, 30, 31]}},
        {"extra": {"eos_token_id": [20, 21, 22, 23]}},
        {"extra": {"temperature": 0.3, "top_k": 2}},
    ],
)
def test_every_option_gives_the_texts_of_the_other_engine(changes: dict[str, Any], build):
    model = build("qwen3")
    actual = sample(model, requests(40), **changes)
    expected = TransformersEngine(model).sample(requests(40), replace(OPTIONS, **changes))
    assert_same_samples(actual, expected)
    assert texts(actual) != texts(sample(model, requests(40)))


# ------------------------------------------------------------------------------------------- ends of completions


def test_eos_stays_in_the_text_and_at_the_last_allowed_token_is_an_end(build):
    model = build("qwen3")
    free = sample(model, requests(), eos_ids=())[0].ids
    place = next(i for i, token in enumerate(free) if token not in free[:i] and i)
    for budget, expected in ((6, "eos"), (place + 1, "eos"), (place, "length")):
        actual = sample(model, requests(1, budget), eos_ids=(free[place],))[0]
        assert (actual.ids, actual.finish_reason) == (free[: min(budget, place + 1)], expected)


@pytest.mark.parametrize("stops", ["ab", ["zz", "b"], ["a", "b", "c", "d", "e", "f"]])
def test_stop_strings_end_a_text_and_stay_in_it(stops: Any, make_model, make_tokenizer):
    model, tokenizer = make_model().eval(), make_tokenizer()
    submitted = [Request(PROMPTS[i % 4], i, 60) for i in range(30)]
    extra = {"stop_strings": stops, "suppress_tokens": [0, 2, 3, *range(10, 100)]}
    actual = sample(model, submitted, tokenizer, extra=extra)
    other = TransformersEngine(model, tokenizer=tokenizer)
    assert texts(actual) == texts(other.sample(submitted, replace(OPTIONS, extra=extra)))
    strings = [stops] if isinstance(stops, str) else stops
    ended = [tokenizer.decode(s.ids) for s in actual if s.finish_reason == "eos" and s.ids[-1] != 1]
    assert len(ended) > 1
    assert all(any(text.endswith(s) and s not in text[:-1] for s in strings) for text in ended)


# ------------------------------------------------------------------------------------------- errors


def test_options_that_are_not_there_are_named_with_the_engine_that_has_them(build):
    options = replace(OPTIONS, extra={"num_beams": 4, "typical_p": 0.5, "top_k": 3}, cache_implementation="static")
    assert unsupported(options) == ["num_beams", "typical_p", "cache_implementation"]
    with pytest.raises(ConfigError) as caught:
        NativeEngine(build("qwen3")).sample(requests(), options)
    for part in ("num_beams, typical_p, cache_implementation", "rollout_engine='transformers'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "extra", [{}, {"num_beams": 1}, {"typical_p": 1.0}, {"use_cache": False}, {"bad_words_ids": None}, {"top_k": 5}]
)
def test_options_that_change_nothing_are_taken(extra: dict[str, Any]):
    assert unsupported(replace(OPTIONS, extra=extra)) == []


@pytest.mark.parametrize(
    ("asked", "changes", "words"),
    [
        (Request([5], 0, 4), {"extra": {"stop_strings": "a"}}, "tokenizer"),
        (Request([5], 0, 4), {"temperature": 0.0}, r"temperature=0\.0"),
        (Request([], 0, 4), {}, "BOS"),
        (Request([5], 0, 0), {}, "max_new_tokens=0"),
    ],
)
def test_what_cannot_be_sampled_is_refused(asked: Request, changes: dict[str, Any], words: str, build):
    with pytest.raises(ValueError, match=words):
        sample(build("qwen3"), [*requests(2), asked], **changes)
