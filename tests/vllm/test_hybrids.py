"""Pushes of models with recurrent layers to a real vLLM, which samples from exactly the pushed weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_vllm import OPTIONS, SETTINGS, Served, is_greedy, mean_difference, requests, vary
from tiny_hybrids import CONFIGS
from transformers import AutoModelForCausalLM

from groupgrad.integrations.vllm.colocate import ColocateOptions, VLLMColocateEngine


def make(family: str, vocab_size: int) -> Any:
    """A small random model whose attention has heads of 32 numbers, as vLLM's CPU kernels need."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.vocab_size, config.head_dim = vocab_size, 32
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["nemotron_h"])
def test_each_push_is_what_is_sampled_from(
    serve: Callable[..., Served], make_tokenizer: Any, tmp_path: Path, family: str
) -> None:
    tokenizer = make_tokenizer()
    policy = make(family, len(tokenizer))
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # vLLM caches states of prefixes only with chunked prefill, which is off on CPUs.
    engine = serve("--no-enable-prefix-caching", of=tmp_path).start().engine()
    engine.connect(policy, num_tokens=64, options=OPTIONS)
    assert_each_push_is_sampled_from(engine, policy)


@pytest.mark.parametrize("family", ["nemotron_h"])
def test_colocate_mode_samples_from_each_push(
    make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    tokenizer = make_tokenizer()
    policy = make(family, len(tokenizer))
    options = ColocateOptions(max_num_seqs=16, max_model_len=128, dtype="float32", extra={"enforce_eager": True})
    engine = VLLMColocateEngine(policy, tokenizer, options)
    try:
        assert_each_push_is_sampled_from(engine, policy)
    finally:
        engine.close()


def assert_each_push_is_sampled_from(engine: Any, policy: Any) -> None:
    rows, greedy = requests(), replace(OPTIONS, temperature=0.0)
    texts, start = [], copy.deepcopy(policy.state_dict())
    for version in range(3):
        before = copy.deepcopy(policy)
        policy.load_state_dict(start)
        vary(policy, version)
        engine.push(policy, version)
        samples = engine.sample(rows, OPTIONS)
        assert mean_difference(policy, rows, samples) < 1e-4 < 0.1 < mean_difference(before, rows, samples)
        assert all(is_greedy(policy, row, sample) for row, sample in zip(rows, engine.sample(rows, greedy)))
        texts.append([sample.ids for sample in samples])
    assert texts[0] != texts[1] != texts[2]
