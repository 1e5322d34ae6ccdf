"""A pretrained model samples what `generate` does, by the numbers that training computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_batches import row_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.kernels import library
from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens

pytestmark = [pytest.mark.real, pytest.mark.timeout(200)]

QUESTIONS = ("Say hello.", "What is 47 + 36?", "Name the capital of France, please.")
GROUPS = (0, 0, 1, 1, 2, 2)


@pytest.fixture(scope="module")
def model(smollm2) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in QUESTIONS
    ]


def sampled(model: Any, tokenizer: Any, prompts: list[list[int]], length: int, **options: Any) -> list[Sample]:
    requests = [Request(prompt, seed=i, max_new_tokens=length) for i, prompt in enumerate(prompts)]
    ends = (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    with torch.no_grad():
        return NativeEngine(model).sample(requests, SamplingOptions(max_new_tokens=length, eos_ids=ends, **options))


@pytest.fixture(scope="module")
def samples(model, tokenizer, prompts) -> list[Sample]:
    return sampled(model, tokenizer, [prompts[group] for group in GROUPS], 16)


@pytest.fixture(scope="module")
def batch(prompts, samples) -> Any:
    return build_batch(prompts, GROUPS, [sample.ids for sample in samples])


def test_greedy_text_is_that_of_generate_and_ends(model, tokenizer, prompts) -> None:
    greedy = sampled(model, tokenizer, prompts, 32, top_k=1)
    for prompt, sample in zip(prompts, greedy):
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
        assert sample.ids == answer[0, len(prompt) :].tolist(), tokenizer.decode(sample.ids)
    assert greedy[0].finish_reason == "eos" and tokenizer.decode(greedy[0].ids[-1:]) == "<|im_end|>"


def test_log_probs_are_those_of_a_dense_pass_and_the_trainers_bits(model, samples, batch) -> None:
    actual = torch.tensor([value for sample in samples for value in sample.logprobs or []])
    exact = torch.log_softmax(row_logits(copy.deepcopy(model).double(), batch), -1)
    dense = exact.gather(-1, batch.completion_ids[:, None]).squeeze(-1)
    assert float((actual.double() - dense).abs().max()) < 1e-4
    scored = score_tokens(model.train(), batch, ForwardOptions()).logprobs.detach()
    model.eval()
    if library() is None:  # without a compiler both sides round by themselves
        torch.testing.assert_close(actual, scored, rtol=0, atol=1e-4)
    else:
        assert torch.equal(actual, scored)


@pytest.mark.skipif(library() is None, reason="without a compiler both sides round by themselves")
def test_log_probs_of_weights_in_bfloat16_are_the_trainers_bits(smollm2, tokenizer, prompts) -> None:
    half = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    samples = sampled(half, tokenizer, [prompts[group] for group in GROUPS], 16)
    actual = torch.tensor([value for sample in samples for value in sample.logprobs or []])
    batch = build_batch(prompts, GROUPS, [sample.ids for sample in samples])
    scores = score_tokens(half.train(), batch, ForwardOptions())
    assert torch.equal(actual, scores.logprobs.detach())
    scores.logprobs.sum().backward()
    assert {parameter.grad.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_the_gradient_of_shared_prompts_is_that_of_padded_rows(model, batch) -> None:
    weights = torch.linspace(-1, 2, batch.num_tokens)

    def gradient(layout: Any) -> list[torch.Tensor]:
        scores = score_tokens(model, batch, ForwardOptions(layout=layout))
        return list(torch.autograd.grad((weights * scores.logprobs).sum(), list(model.parameters())))

    for (name, _), shared, dense in zip(model.named_parameters(), gradient("shared"), gradient("dense")):
        assert float((shared - dense).norm()) < 1e-3 * float(dense.norm()), name
