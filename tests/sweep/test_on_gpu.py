"""Arms on a simulated CUDA device share frozen weights, their first samples and reference log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_cuda import SimulatedTensor, to_cuda, trainers_on_simulated_cuda
from torch import nn

from groupgrad.apps.sweep import sharing
from groupgrad.apps.sweep.common_work import _changing_weights, weighted_sum_of_bits
from groupgrad.apps.sweep.sharing import SharedWeights
from groupgrad.engines.native import NativeEngine

ROWS = 8
"""Completions of a step; the trial of an engine on a new model has fewer."""


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of completions of each call that has sampled a generation batch."""
    calls: list[int] = []
    sample = NativeEngine.sample

    def counted(self: Any, requests: Any, options: Any) -> Any:
        calls.extend([len(requests)] if len(requests) == ROWS else [])
        return sample(self, requests, options)

    monkeypatch.setattr(NativeEngine, "sample", counted)
    return calls


@pytest.mark.slow
def test_arms_share_their_first_batch(make_sweep, arguments, sampled):
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    with trainers_on_simulated_cuda():
        arguments["model"] = to_cuda(arguments["model"])
        args = {"use_cpu": False, "max_steps": 2, "beta": 0.1}
        sweeper = make_sweep({"learning_rate": [1e-2, 3e-2]}, args=args, peft_config=adapter, turn_steps=1)._sweeper
        for arm in sweeper.store.arms():
            sweeper._turn(arm)
        arms = sweeper.store.arms()
        assert [arm.reason for arm in arms] == ["", ""]
        assert len(sampled) == 1
        assert sweeper.run() == 0
    assert len(sampled) == 1 + 2


def test_frozen_weights_are_shared_on_their_device_alone(make_model, monkeypatch):
    monkeypatch.setattr(sharing, "_PLAIN_TENSORS", (torch.Tensor, SimulatedTensor))
    with trainers_on_simulated_cuda():
        models = [
            make_model(0).requires_grad_(False),
            *(to_cuda(make_model(0).requires_grad_(False)) for _ in range(2)),
        ]
        shared = SharedWeights()
        freed = [shared.share(model) for model in models]
    assert freed[:2] == [0, 0]
    assert freed[2] >= sum(p.nbytes for p in models[2].parameters()) > 0


def test_the_digest_of_weights_on_a_gpu_tells_changes_apart(make_model):
    with trainers_on_simulated_cuda():
        model = to_cuda(nn.Linear(5, 3))
        before = _changing_weights(model)
        assert _changing_weights(model) == before
        with torch.no_grad():
            model.weight[0, 1] += 1
            model.weight[0, 2] -= 1
        assert _changing_weights(model) != before


def test_weighted_sums_of_bits_are_no_plain_sums(monkeypatch):
    first = torch.arange(64, dtype=torch.uint8)
    swapped = torch.cat([first[8:16], first[:8], first[16:]])
    whole = weighted_sum_of_bits(first)
    assert whole != weighted_sum_of_bits(swapped)
    assert weighted_sum_of_bits(first[:61]) != weighted_sum_of_bits(first[:60])
    monkeypatch.setattr("groupgrad.apps.sweep.common_work._WORDS_AT_ONCE", 3)
    assert weighted_sum_of_bits(first) == whole
