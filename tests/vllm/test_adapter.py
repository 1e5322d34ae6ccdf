"""Adapters on a real vLLM server: alone, or merged into the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from real_vllm import OPTIONS, Served, is_greedy, mean_difference, requests, vary

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served]) -> Iterator[Served]:
    """A server that takes adapters."""
    served = serve("--enable-lora", "--max-lora-rank", "8").start()
    yield served
    served.kill()


def adapted(policy: Any, rank: int = 4) -> Any:
    config = peft.LoraConfig(
        r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(policy, config).eval()


def test_each_push_of_an_adapter_is_what_is_sampled_from(server: Served, policy: Any) -> None:
    model, engine, rows = adapted(policy), server.engine(), requests()
    sizes = []
    for version in range(3):
        vary(model, version, only="lora_")
        engine.push_adapter(model, version)
        assert engine.weight_version.startswith(f"{version}-")
        samples = engine.sample(rows, OPTIONS)
        assert mean_difference(model, rows, samples) < 1e-5
        greedy = engine.sample(rows, replace(OPTIONS, temperature=0.0))
        assert all(is_greedy(model, row, sample) for row, sample in zip(rows, greedy))
        sizes.append(engine.info["base_version"])
    # The weights below the adapter were sent once.
    assert sizes == [engine.base_version] * 3


def test_whole_weights_and_adapters_may_follow_each_other(server: Served, policy: Any) -> None:
    model, engine, rows = adapted(policy), server.engine(), requests()
    for version in range(2):
        engine.push(vary(model, version), 2 * version)
        assert mean_difference(model, rows, engine.sample(rows, OPTIONS)) < 1e-5
        other = server.engine()
        other.push_adapter(vary(model, version + 10, only="lora_"), 2 * version + 1)
        assert mean_difference(model, rows, other.sample(rows, OPTIONS)) < 1e-5
