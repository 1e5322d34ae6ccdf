"""Pushes to a real vLLM server under rows that go on: log-probs of tokens before and after, and training with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_vllm import Served, vary
from sampling_thread import Sampling
from vllm_training import LARGE, logged, make_trainer
from waiting import until

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.integrations.vllm.vllm_policy import VLLMPolicy

OPTIONS = SamplingOptions(max_new_tokens=120, eos_ids=())
PROMPT = [4 + number % 80 for number in range(300)]
"""Longer than a block of vLLM's prefix cache."""


@torch.no_grad()
def logprobs_across(models: list[Any], row: Request, sample: Sample) -> torch.Tensor:
    """Returns the log-probs (tokens,) of a row whose tokens were sampled by each of `models` in turn.

    `models[n]` is the model of optimizer step n. A token's keys and values stay those of the weights that computed
    them. The last token before a push has none yet: the new weights compute them.
    """
    ids, versions = sample.ids, sample.policy_versions or []
    cache: Any = None
    rest, found = row.prompt_ids, []
    for step, model in enumerate(models):
        count = versions.count(step)
        if not count:
            continue
        start = len(torch.cat(found)) if found else 0
        output = model(torch.tensor([rest + ids[start : start + count - 1]]), past_key_values=cache, use_cache=True)
        cache, rest = output.past_key_values, [ids[start + count - 1]]
        table = output.logits[0, -count:].log_softmax(-1)
        found.append(table.gather(-1, torch.tensor(ids[start : start + count])[:, None]).squeeze(-1))
    return torch.cat(found)


def check(models: list[Any], rows: list[Request], samples: list[Sample]) -> None:
    for row, sample in zip(rows, samples):
        versions = sample.policy_versions or []
        assert len(sample.ids) == len(versions) == row.max_new_tokens and versions == sorted(versions)
        gap = (logprobs_across(models, row, sample) - torch.tensor(sample.logprobs)).abs().max()
        assert gap < 1e-4, (row.seed, versions.count(0), float(gap))


def test_tokens_before_and_after_a_push_are_of_the_weights_that_they_name(server: Served, policy: Any) -> None:
    engine = server.engine()
    engine.connect(policy, num_tokens=128, options=OPTIONS)
    served, models = VLLMPolicy(engine, policy), [copy.deepcopy(policy)]
    served.refresh(0)
    # Twenty rows, of which vLLM samples sixteen at a time: short ones, whose ends call for pushes, then long ones.
    lengths = [6, 12, 18, 24, *[120] * 12, *[30] * 4]
    rows = [Request([4 + i // 2, 20, 30], seed=1000 + i, max_new_tokens=lengths[i]) for i in range(20)]
    with server.slowed():
        sampling = Sampling(served, rows, OPTIONS)
        for step, num_ended in ((1, 1), (2, 2)):
            until(lambda num_ended=num_ended: len(sampling.samples) >= num_ended or sampling.error is not None, 60.0)
            vary(policy, step)
            models.append(copy.deepcopy(policy))
            served.refresh(step, keeps_rows=True)
    samples = sampling.result()
    check(models, rows, samples)
    found = [tuple(dict.fromkeys(sample.policy_versions or [])) for sample in samples]
    assert (0,) in found and (0, 1, 2) in found, found
    # Log-probs of either weights alone do not fit the rows that both have sampled.
    mixed = next(number for number, versions in enumerate(found) if versions == (0, 1, 2))
    alone = replace(samples[mixed], policy_versions=[0] * len(samples[mixed].ids))
    assert (logprobs_across(models, rows[mixed], alone) - torch.tensor(samples[mixed].logprobs)).abs().max() > 0.1
    # Afterwards the server is as ever.
    served.refresh(3)
    (again,) = served.sample(rows[:1], OPTIONS)
    check([None, None, None, policy], rows[:1], [again])


def test_rows_that_begin_after_a_push_take_nothing_from_rows_before_it(
    large_server: Callable[[], Served], make_model: Any
) -> None:
    policy = vary(make_model(seed=3, **LARGE).eval(), 3)
    server = large_server()
    engine = server.engine()
    engine.connect(policy, num_tokens=500, options=OPTIONS)
    served, models = VLLMPolicy(engine, policy), [copy.deepcopy(policy), vary(copy.deepcopy(policy), 1)]
    served.refresh(0)
    rows = [Request(PROMPT, seed=number, max_new_tokens=200 if number else 2) for number in range(8)]
    with server.slowed():
        sampling = Sampling(served, rows, OPTIONS)
        until(lambda: bool(sampling.samples) or sampling.error is not None, 60.0)
        policy.load_state_dict(models[1].state_dict())
        served.refresh(1, keeps_rows=True)
    later = [Request(PROMPT, seed=10 + number, max_new_tokens=4) for number in range(2)]
    fresh = served.sample(later, OPTIONS)
    check(models, later, fresh)
    assert all(set(sample.policy_versions or []) == {1} for sample in fresh)
    samples = sampling.result()
    check(models, rows, samples)
    assert set(samples[1].policy_versions or []) == {0, 1}


def test_a_run_with_updates_in_flight_trains_on_each_tokens_own_weights(
    large_server: Callable[[], Served], make_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    refresh, server, slow = VLLMPolicy.refresh, large_server(), ExitStack()

    def recorded(self: VLLMPolicy, step: int, *, keeps_rows: bool = False) -> None:
        kept.extend([step] if keeps_rows else [])
        refresh(self, step, keeps_rows=keeps_rows)
        # The batch that begins now is under way when the next push comes, however fast the server is.
        if kept:
            slow.close()
        elif step == 1:
            slow.enter_context(server.slowed())

    monkeypatch.setattr(VLLMPolicy, "refresh", recorded)
    where = {"vllm_mode": "server", "vllm_server_port": server.port, "max_completion_length": 200}
    ahead = {"rollout_ahead": 2, "vllm_in_flight_updates": True, "max_steps": 6, "learning_rate": 1e-3}
    policy = vary(make_model(seed=3, **LARGE), 3)
    trainer = make_trainer(policy, tokenizer, tmp_path / "run", **where, **ahead)
    trainer.watch.trainer = None  # type: ignore[attr-defined]
    with slow:
        trainer.train()
    trainer.vllm_policy.close()
    lags, means = logged(trainer, "sampling/policy_lag"), logged(trainer, "sampling/policy_lag_mean")
    assert kept, "weights were sent while rows were sampled"
    assert len(lags) == 6 and max(lags) <= 2 and all(mean <= lag for mean, lag in zip(means, lags))
