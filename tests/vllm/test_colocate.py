"""The colocate engine with a real vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from real_vllm import OPTIONS, SETTINGS, SIZES, is_greedy, mean_difference, requests, vary
from sample_checks import drained

from groupgrad.engines.base import Request
from groupgrad.integrations.vllm.colocate import ColocateOptions, VLLMColocateEngine

COLOCATE = ColocateOptions(
    max_num_seqs=16,
    max_model_len=128,
    dtype="float32",
    max_lora_rank=4,
    extra={"enforce_eager": True, "max_num_batched_tokens": 128},
)


@pytest.fixture(scope="module")
def engine(make_model: Any, make_tokenizer: Any) -> Iterator[VLLMColocateEngine]:
    """An engine with random weights: correct samples can only come from pushed ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        engine = VLLMColocateEngine(make_model(seed=5, **SIZES), make_tokenizer(), COLOCATE)
        yield engine
        engine.close()


def test_each_push_is_what_is_sampled_from(engine: VLLMColocateEngine, policy: Any) -> None:
    rows = requests()
    texts = []
    for version in range(3):
        engine.push(vary(policy, version), version)
        assert engine.weight_version.startswith(f"{version}-")
        samples = engine.sample(rows, OPTIONS)
        assert mean_difference(policy, rows, samples) < 1e-5
        greedy = engine.sample(rows, replace(OPTIONS, temperature=0.0))
        assert all(is_greedy(policy, row, sample) for row, sample in zip(rows, greedy))
        texts.append([sample.ids for sample in samples])
    assert texts[0] != texts[1] != texts[2]


def test_a_row_depends_on_its_seed_and_prompt_alone(engine: VLLMColocateEngine, policy: Any) -> None:
    engine.push(policy, 0)
    rows = requests()
    together = [sample.ids for sample in engine.sample(rows, OPTIONS)]
    assert together == [engine.sample([row], OPTIONS)[0].ids for row in rows]
    assert together == [sample.ids for sample in engine.sample(rows[::-1], OPTIONS)][::-1]


def test_prompts_with_more_tokens_than_a_step_takes(engine: VLLMColocateEngine, policy: Any) -> None:
    engine.push(policy, 0)
    prompts = [[4 + (7 * i + j * j) % 38 for j in range(50)] for i in range(6)]
    rows = [Request(prompt, seed=i, max_new_tokens=8) for i, prompt in enumerate(prompts)]
    together = [sample.ids for sample in engine.sample(rows, OPTIONS)]
    assert together == [engine.sample([row], OPTIONS)[0].ids for row in rows]


def adapted(policy: Any, rank: int = 4) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(policy, config).eval()


def test_each_push_of_an_adapter_alone_is_what_is_sampled_from(engine: VLLMColocateEngine, policy: Any) -> None:
    model, rows = adapted(policy), requests()
    for version in range(3):
        weight_version = engine.push_adapter(vary(model, version, only="lora_"), version)
        assert weight_version == engine.weight_version and engine.weight_version.startswith(f"{version}-")
        assert mean_difference(model, rows, engine.sample(rows, OPTIONS)) < 1e-5
        greedy = engine.sample(rows, replace(OPTIONS, temperature=0.0))
        assert all(is_greedy(model, row, sample) for row, sample in zip(rows, greedy))
    # Whole weights and adapters may follow each other.
    engine.push(vary(model, 7), 3)
    assert mean_difference(model, rows, engine.sample(rows, OPTIONS)) < 1e-5
    engine.push_adapter(vary(model, 8, only="lora_"), 4)
    assert mean_difference(model, rows, engine.sample(rows, OPTIONS)) < 1e-5


def test_what_vllm_refuses_is_a_value_error(engine: VLLMColocateEngine, policy: Any) -> None:
    with pytest.raises(ValueError, match=r"min_tokens .*see generation_kwargs$"):
        engine.check(replace(OPTIONS, extra={"min_tokens": -1}))
    engine.push(policy, 0)
    with pytest.raises(ValueError, match="140"):
        engine.sample([Request([5] * 140, seed=1, max_new_tokens=4)], OPTIONS)


def test_requests_may_come_while_others_are_sampled(engine: VLLMColocateEngine, policy: Any) -> None:
    engine.push(policy, 0)
    rows = requests(4, tokens=20)
    expected = [sample.ids for sample in engine.sample(rows, OPTIONS)]
    with engine.session(OPTIONS) as session:
        tickets = [session.submit(row) for row in rows[:2]]
        samples = dict(session.advance())
        tickets += [session.submit(row) for row in rows[2:]]
        samples.update(drained(session))
    assert [samples[ticket].ids for ticket in tickets] == expected


def test_the_process_goes_on_as_if_vllm_was_not_there(engine: VLLMColocateEngine, policy: Any) -> None:
    def streams() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    before = streams()
    engine.push(policy, 0)
    engine.sample(requests(), OPTIONS)
    assert streams() == before

    ids = torch.tensor([[4, 5, 6]])
    policy(ids, labels=ids).loss.backward()
    assert policy.lm_head.weight.grad is not None and torch.isfinite(policy.lm_head.weight.grad).all()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_a_push_that_leaves_weights_out_is_refused_and_nothing_sampled(engine: VLLMColocateEngine, policy: Any) -> None:
    del policy.model.layers[1].mlp.down_proj.weight
    with pytest.raises(RuntimeError, match=r"nothing was sent for model\.layers\.1\.mlp\.down_proj\.weight"):
        engine.push(policy, 7)
    with pytest.raises(ValueError, match="no whole weights"):
        engine.sample(requests(), OPTIONS)


def test_structure_comes_from_generation_kwargs(engine: VLLMColocateEngine, policy: Any, tokenizer: Any) -> None:
    engine.push(policy, 0)
    options = replace(OPTIONS, extra={"structured_outputs": {"choice": ["yes", "no"]}})
    texts = {tokenizer.decode(sample.ids[:-1]) for sample in engine.sample(requests(), options)}
    assert texts <= {"yes", "no"}


def test_contexts_that_do_not_fit_are_refused(engine: VLLMColocateEngine) -> None:
    engine.check(OPTIONS, num_tokens=128)
    with pytest.raises(ValueError, match=r"context holds 128 tokens, .* may have 129; raise vllm_max_model_length"):
        engine.check(OPTIONS, num_tokens=129)


def test_sleep_on_a_cpu_is_refused(policy: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="vllm_enable_sleep_mode=True, but vLLM cannot sleep on a CPU"):
        VLLMColocateEngine(policy, tokenizer, replace(COLOCATE, sleep_mode=True))
