"""Arms take samples, reference log-probs and tokenised prompts from one another, as far as they are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from groupgrad.apps.sweep.common_work import CommonWork, _changing_weights
from groupgrad.apps.sweep.store import Store
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.native import NativeEngine
from groupgrad.scoring.old_and_ref import OldAndRefScorer

STEPS = {"max_steps": 2}
ROWS = 8
"""Completions of a step; the trial of an engine on a new model has fewer."""


@pytest.fixture
def sampled(monkeypatch) -> list[int]:
    """The number of completions of each call that has sampled a generation batch."""
    calls: list[int] = []
    sample = NativeEngine.sample

    def counted(self: Any, requests: Any, options: Any) -> Any:
        if len(requests) == ROWS:
            calls.append(len(requests))
        return sample(self, requests, options)

    monkeypatch.setattr(NativeEngine, "sample", counted)
    return calls


@pytest.fixture
def scored(monkeypatch) -> list[int]:
    """The number of tokens of each pass through a reference."""
    calls: list[int] = []
    score = OldAndRefScorer.reference_logprobs

    def counted(self: Any, batch: Any, **kwargs: Any) -> Any:
        found = score(self, batch, **kwargs)
        calls.extend([] if found is None else [len(found)])
        return found

    monkeypatch.setattr(OldAndRefScorer, "reference_logprobs", counted)
    return calls


def test_arms_of_equal_weights_sample_once_with_the_bits_of_runs_alone(
    make_sweep: Callable[..., Any], train_alone: Any, tools: Any, tmp_path: Any, sampled: list[int]
):
    vary = {"learning_rate": [1e-2, 3e-2], "loss_type": ["grpo", "dapo"]}
    results = make_sweep(vary, args={"max_steps": 3}).run()
    assert len(sampled) == 4 * 3 - 3  # the first batch of all arms is one
    for result in results:
        folder = tmp_path / "sweep/arms" / result.name
        train_alone(result.name, **{"max_steps": 3, **result.changes})
        assert tools.equal_files(folder, tmp_path / result.name)
        assert tools.logs(folder) == tools.logs(tmp_path / result.name)


def test_arms_without_steps_of_their_own_share_until_they_part(make_sweep, tools, tmp_path, sampled):
    # A learning rate that rises from 0 leaves the weights as they are in the first step.
    args = {"max_steps": 3, "warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"}
    make_sweep({"learning_rate": [1e-2, 3e-2]}, args=args).run()
    assert len(sampled) == 2 * 3 - 2


@pytest.mark.parametrize(
    "vary",
    [
        {"temperature": [1.0, 0.8]},
        {"top_k": [0, 5]},
        {"seed": [42, 43]},
        {"num_generations": [2, 4]},
        {"max_completion_length": [5, 6]},
    ],
    ids=lambda vary: next(iter(vary)),
)
def test_arms_that_sample_otherwise_share_nothing(make_sweep, sampled, vary):
    results = make_sweep(vary, args=STEPS).run()
    assert [result.state for result in results] == ["done", "done"]
    assert len(sampled) == 2 * 2


def test_arms_with_other_adapters_share_nothing(make_sweep, sampled):
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    make_sweep({"peft_config.lora_alpha": [4, 8]}, args=STEPS, peft_config=adapter).run()
    assert len(sampled) == 2 * 2


def test_reference_log_probs_of_the_same_rows_are_computed_once(
    make_sweep, train_alone, tools, tmp_path, sampled, scored
):
    results = make_sweep({"beta": [0.1, 0.2]}, args={"max_steps": 3}).run()
    # The KL term has no gradient while the policy is the reference, so the arms part in their second step.
    assert (len(sampled), len(scored)) == (2 * 3 - 2, 2 * 3 - 2)
    for result in results:
        train_alone(result.name, **{"max_steps": 3, **result.changes})
        assert tools.equal_files(tmp_path / "sweep/arms" / result.name, tmp_path / result.name)
        assert tools.logs(tmp_path / "sweep/arms" / result.name) == tools.logs(tmp_path / result.name)


def test_a_reference_that_moves_is_never_shared(make_sweep, scored):
    make_sweep({"beta": [0.1, 0.2]}, args={**STEPS, "sync_ref_model": True, "ref_model_sync_steps": 1}).run()
    assert len(scored) == 2 * 2


def test_prompts_are_tokenised_once(make_sweep, tmp_path, monkeypatch):
    texts: list[Any] = []
    tokenise = PromptMaker.token_ids
    monkeypatch.setattr(PromptMaker, "token_ids", lambda self, prompt: texts.append(prompt) or tokenise(self, prompt))
    sweeper = make_sweep({"learning_rate": [1e-2, 3e-2]}, args=STEPS)._sweeper
    first, second = Store(tmp_path / "sweep").arms()
    counts = []
    for arm in (first, second):
        sweeper.turns.run_of(arm)
        texts.clear()
        sweeper._turn(arm)
        counts.append(len(texts))
    assert counts[0] >= 4  # two prompts a step, and those that are measured when training begins
    assert counts[1] == 0


def test_kept_results_are_bounded_and_the_oldest_goes():
    work, computed = CommonWork(max_bytes=10), []

    def ask(name: str) -> None:
        work.result([name], lambda: computed.append(name), lambda _: 4)

    for name in ("a", "b", "a", "c", "a", "b"):
        ask(name)
    assert computed == ["a", "b", "c", "b"]


def test_changes_that_cancel_in_a_sum_are_told_apart():
    first, second = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        second.weight.copy_(torch.tensor([[3.0, 4.0, 1.0, 2.0]]))
    assert _changing_weights(first) != _changing_weights(second)
    second.weight.data.copy_(first.weight.data)
    assert _changing_weights(first) == _changing_weights(second)
