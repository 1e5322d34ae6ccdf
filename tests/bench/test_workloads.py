"""The workloads have the sizes and targets of the report; rewards, prompts and lengths are what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from materials import NEVER, make_model, make_words, prepare, random_rows, read_rows, set_ending
from transformers import AutoConfig
from workloads import WORKLOADS, GroupWork, ModelShape, Workload, groups_of, scattered_reward

from groupgrad.apps.demo import pretrained
from groupgrad.engines.base import SamplingOptions
from groupgrad.engines.native.engine import NativeEngine


@pytest.fixture(scope="module")
def small():
    return ModelShape(
        vocab_size=512, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64
    )


def test_targets():
    assert {name: workload.target for name, workload in WORKLOADS.items()} == {
        "uniform": 1.7,
        "ragged": 5,
        "long_prompt": 5,
        "large_vocab": 3,
        "reasoning": 10,
        "hybrid_uniform": 2.5,
        "hybrid_reasoning": 12,
        "hybrid_mamba": None,
        "gsm8k": None,
        "demo": None,
        "real": 10,
    }


def test_micro_batches_hold_whole_groups():
    for workload in WORKLOADS.values():
        assert workload.batch_rows % (workload.micro_batches * workload.num_generations) == 0
        assert workload.num_groups * workload.num_generations == workload.batch_rows


def test_groups_of_a_measured_step():
    step = {"prompt_tokens": [3, 3, 5, 5], "lengths": [1, 2, 3, 4], "rewards": [0.5, 0.5, 0.0, 1.0]}
    assert groups_of(step, 2) == [GroupWork(3, (1, 2), live=False), GroupWork(5, (3, 4), live=True)]


def test_scattered_rewards_follow_the_ids_and_differ():
    assert scattered_reward([]) == 2166136261 / 2**32
    assert scattered_reward([97]) == 0xE40C292C / 2**32  # FNV-1a of "a"
    rewards = {scattered_reward([i, j]) for i in range(20) for j in range(20)}
    assert len(rewards) == 400
    assert 0 <= min(rewards) < 0.05 and 0.95 < max(rewards) < 1


def test_half_of_the_prompts_are_flat_and_all_have_the_length_they_say():
    workload = WORKLOADS["reasoning"]
    rows, tokenizer = random_rows(workload), make_words(workload.model.vocab_size)
    assert [row["flat"] for row in rows[:4]] == [False, True, False, True]
    for row in rows[:4]:
        ids = tokenizer(row["prompt"])["input_ids"]
        assert len(ids) == row["prompt_tokens"] == 256
        assert min(ids) >= 2 and tokenizer.decode(ids).split() == row["prompt"].split()


@pytest.mark.quick(1)
@pytest.mark.parametrize("tied", [False, True])
def test_completions_end_with_the_probability_asked_for(small, tied):
    tokenizer = make_words(small.vocab_size)
    model = make_model(replace(small, tied=tied), tokenizer).eval()
    set_ending(model, tokenizer.eos_token_id, 1 / 20)
    prompts = torch.randint(2, small.vocab_size, (400, 4), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    ids = model.generate(prompts, max_new_tokens=200, do_sample=True, top_k=0, attention_mask=torch.ones_like(prompts))
    lengths = (ids[:, 4:] != tokenizer.pad_token_id).sum(1).double()
    assert lengths.mean().item() == pytest.approx(20, abs=3)  # standard error 1
    assert lengths.std().item() == pytest.approx(19.5, abs=4)


def test_completions_that_never_end(small):
    tokenizer = make_words(small.vocab_size)
    model = make_model(small, tokenizer).eval()
    set_ending(model, tokenizer.eos_token_id, NEVER)
    ids = torch.randint(2, small.vocab_size, (4, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        probabilities = model(ids).logits.softmax(-1)[..., tokenizer.eos_token_id]
    assert probabilities.max().item() < 1e-9


def test_prepared_folders_are_kept_until_the_recipe_changes(tmp_path, small):
    workload = Workload("little", small, prompt_tokens=5, limit=4, num_generations=2, batch_rows=4)
    folder = prepare(workload, tmp_path)
    written = (folder / "rows.jsonl").stat().st_mtime_ns
    assert len(read_rows(prepare(workload, tmp_path))[0]["prompt"].split()) == 5
    assert (folder / "rows.jsonl").stat().st_mtime_ns == written
    prepare(replace(workload, prompt_tokens=6), tmp_path)
    assert read_rows(folder)[0]["prompt_tokens"] == 6


@pytest.mark.parametrize("name", ["hybrid_uniform", "hybrid_mamba"])
def test_hybrids_are_counted_as_they_are_made(name: str) -> None:
    """Weights of matrices, and numbers in the states that a row of the native engine keeps."""
    full = WORKLOADS[name].model
    assert full.recurrent is not None
    shape = replace(
        full,
        vocab_size=64,
        hidden_size=32,
        head_dim=8,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        recurrent=replace(full.recurrent, num_heads=4, num_key_heads=2, key_dim=8, value_dim=16),
    )
    model = make_model(shape, make_words(64)).eval()
    assert sum(p.numel() for p in model.parameters() if p.dim() == 2) == shape.num_parameters
    with NativeEngine(model).session(SamplingOptions(max_new_tokens=4)) as session:
        states: Any = session._cache.suffixes.states  # pyright: ignore[reportAttributeAccessIssue]
    numbers = [torch.Size(state.shape[1:]).numel() for state in states if state.dim() == 4]
    assert shape.recurrent is not None and sum(numbers) == shape.recurrent.state_numbers
    assert set_ending(model, 1, 1 / 20, num_tokens=64) == pytest.approx(1 / 20, rel=0.05)


def test_without_the_wheel_the_real_workload_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "missing_because", lambda: "it is not there (pip install it)")
    with pytest.raises(FileNotFoundError, match=r"SmolLM2-135M-Instruct, but it is not there \(pip install it\)"):
        prepare(WORKLOADS["real"], tmp_path)
    assert not (tmp_path / "real" / "recipe.txt").exists()


@pytest.mark.real
def test_the_real_model_has_the_shape_of_its_workload(smollm2):
    config, shape = AutoConfig.from_pretrained(smollm2), WORKLOADS["real"].model
    assert config.tie_word_embeddings == shape.tied
    for size in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
        assert getattr(config, size) == getattr(shape, size)
    layers = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    assert layers == (shape.num_layers, shape.num_heads, shape.num_kv_heads)
