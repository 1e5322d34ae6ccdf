"""Log-probs known from sampling are not computed again, rows without a gradient cost nothing, and no number changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from noted_calls import note_calls

from groupgrad.batch import Batch
from groupgrad.batching import micro_batches
from groupgrad.engines.base import BatchEngine
from groupgrad.objectives import FORWARD_AND_BACKWARD
from groupgrad.trainer import trainer as trainer_module

# Where a gradient is 0 but for rounding, AdamW with its usual epsilon would take a full step in a random direction.
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1, "adam_epsilon": 1e-5}
SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
TWO_STEPS = {"generation_batch_size": 32, "max_steps": 4}


def some_groups_flat(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Every other group of four gets equal rewards."""
    return [float(len(ids) + ids[0] % 3) if i // 4 % 2 else 1.0 for i, ids in enumerate(completion_ids)]


def all_live(batch: Batch, *args: Any, **terms: Any) -> torch.Tensor:
    """The passes of a step that skips nothing."""
    return torch.full_like(batch.prompt_of_row, FORWARD_AND_BACKWARD)


class OtherEngine(BatchEngine):
    """The same samples from an engine that promises nothing and gives no entropies."""

    def __init__(self, trainer: Any):
        self.inner = trainer.engine

    def sample(self, requests, options):
        return [replace(sample, entropies=None) for sample in self.inner.sample(requests, options)]


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, bool]]:
    """(completion tokens, with gradient) of each pass of the policy in training."""
    note = lambda model, batch, *_: (batch.num_tokens, torch.is_grad_enabled())  # noqa: E731
    return note_calls(monkeypatch, trainer_module, "score_tokens", note)


@pytest.fixture
def train(make_trainer, make_policy, tools, monkeypatch):
    """`train(exact=..., share=..., **settings)`: trainer and final weights. The native engine samples, or one that is
    not exact. Not `share`: all rows train as planned."""

    def run(*, exact: bool, share: bool = True, prepare: Callable[[Any], None] | None = None, **settings: Any):
        policy = make_policy(attention_dropout=settings.pop("dropout", 0.0))
        trainer = make_trainer(
            model=policy, **{"reward_funcs": some_groups_flat, **SPLIT, **ADAMW, "disable_dropout": False, **settings}
        )
        if not exact:
            trainer.engine = OtherEngine(trainer)
            choice = replace(trainer.execution.engine_choice, engine=trainer.engine)
            trainer.execution = replace(trainer.execution, engine_choice=choice)
            trainer._start_anew()
        if prepare is not None:
            prepare(trainer)
        with monkeypatch.context() as patch:
            if not share:
                patch.setattr(micro_batches, "required_passes", all_live)
            trainer.train()
        return trainer, tools.weights(policy)

    return run


CASES: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "two_steps": TWO_STEPS,
    "num_iterations": {"num_iterations": 2, "max_steps": 4},
    "generation_batch_ends_within_a_step": {"generation_batch_size": 24, "max_steps": 4, "loss_type": "bnpo"},
    "step_of_several_generation_batches": {"generation_batch_size": 8, "num_iterations": 2, "max_steps": 2},
    "top_entropy": {"top_entropy_quantile": 0.4, "beta": 0.1, **TWO_STEPS},
    "adaptive_entropy": {"use_adaptive_entropy": True, "entropy_target": 1.0, "entropy_coef_delta": 0.05, **TWO_STEPS},
    "masked": {
        "mask_truncated_completions": True,
        "max_completion_length": 3,
        "off_policy_mask_threshold": 0.01,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        **TWO_STEPS,
    },
}


@pytest.mark.quick("masked", "num_iterations", "top_entropy")
@pytest.mark.parametrize("case", CASES)
def test_numbers_of_sampling_change_nothing(train, tools, case):
    plain, weights = train(exact=False, share=False, **CASES[case])
    exact, exact_weights = train(exact=True, **CASES[case])
    assert tools.relative(exact_weights, weights) < 1e-5
    tools.assert_like(exact.state.log_history, plain.state.log_history, 1e-4, without=["sampling/"])
    gaps = [entry.get("sampling/logp_mismatch") for entry in exact.state.log_history[:-1]]
    fresh = {"two_steps": [0, 2], "on_policy": [0, 1, 2], "num_iterations": [0, 2]}.get(case, [0])
    assert all(gaps[step] is not None and gaps[step] < 1e-5 for step in fresh)
    if case in ("two_steps", "num_iterations"):
        assert gaps[1] is gaps[3] is None


def test_only_live_rows_are_forwarded_on_policy(train, passes):
    trainer, _ = train(exact=True, max_steps=1)
    batch = trainer.buffer.batches[0]
    live = int((batch.advantages != 0)[batch.row_of_token].sum())
    assert [grad for _, grad in passes] == [True] * len(passes)
    assert sum(tokens for tokens, _ in passes) == live < batch.num_tokens
    assert len(passes) == 2  # the two live groups, whole; the other two micro-batches cost nothing


@pytest.mark.parametrize("exact", [True, False])
def test_later_steps_of_a_generation_batch_measure_dead_rows_without_gradient(train, passes, exact):
    """The first of two steps over one batch needs no pass for them with an exact engine, and a forward without."""
    trainer, _ = train(exact=exact, num_iterations=2, max_steps=2)
    batch = trainer.buffer.batches[0]
    dead = int((batch.advantages == 0)[batch.row_of_token].sum())
    live = int((batch.advantages != 0)[batch.row_of_token].sum())
    assert sum(tokens for tokens, grad in passes if grad) == 2 * live
    assert sum(tokens for tokens, grad in passes if not grad) == (1 if exact else 2) * dead > 0


def sampling(change: Callable[[int, Any], Any]) -> Callable[[Any], None]:
    """Has the engine's samples changed, by their place."""

    def prepare(trainer: Any) -> None:
        sample = trainer.engine.sample
        trainer.engine.sample = lambda *given: [change(place, found) for place, found in enumerate(sample(*given))]

    return prepare


def test_a_missing_logprob_brings_the_pass_back(train):
    lame = sampling(lambda place, sample: replace(sample, logprobs=None) if place == 5 else sample)
    trainer, _ = train(exact=True, prepare=lame, learning_rate=0.0, **{**TWO_STEPS, "max_steps": 1})
    batch = trainer.buffer.batches[0]
    known = batch.sampling_logprobs.isfinite()
    assert not bool(known.all())
    assert bool(batch.old_logprobs.isfinite().all())
    torch.testing.assert_close(batch.old_logprobs[known], batch.sampling_logprobs[known], rtol=0, atol=1e-5)


def test_a_step_without_signal_still_decays(train, tools):
    """AdamW moves by its momenta and by weight decay although no gradient comes."""

    def flat_in_the_end(completion_ids, trainer_state, **kwargs):
        return some_groups_flat(completion_ids) if trainer_state.global_step == 0 else [1.0] * len(completion_ids)

    (_, plain), (_, exact) = (
        train(exact=share, share=share, reward_funcs=flat_in_the_end, max_steps=3) for share in (False, True)
    )
    assert tools.relative(exact, plain) < 1e-5


def test_a_wrong_engine_is_warned_of_once(train, caplog):
    wrong = sampling(lambda place, sample: replace(sample, logprobs=[value + 0.25 for value in sample.logprobs]))
    with caplog.at_level(logging.WARNING, logger="groupgrad"):
        trainer, _ = train(exact=True, prepare=wrong)
    gaps = [entry["sampling/logp_mismatch"] for entry in trainer.state.log_history[:-1]]
    assert gaps == [pytest.approx(0.25, abs=1e-5)] * 3
    assert caplog.text.count("sampling/logp_mismatch") == 1


def test_with_dropout_training_is_apart_from_sampling(train, passes):
    trainer, _ = train(exact=True, dropout=0.3, max_steps=1)
    assert "sampling/logp_mismatch" not in trainer.state.log_history[0]
    assert sum(tokens for tokens, _ in passes) == trainer.buffer.batches[0].num_tokens
    assert any(not grad for _, grad in passes)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_run_short_of_memory_learns_the_same(train, tools, monkeypatch, where):
    settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "max_steps": 2}
    whole, weights = train(exact=False, **settings)
    hooks: list[Any] = []
    plain, failures = trainer_module.score_tokens, []

    def short(model, batch, options, *precomputed):
        def fail(*_):
            failures.append(batch.num_tokens)
            while hooks:
                hooks.pop().remove()
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        too_large = torch.is_grad_enabled() and batch.num_tokens > 12
        if too_large and where == "forward":
            fail()
        scores = plain(model, batch, options, *precomputed)
        if too_large:
            # The upper layers have their gradients by then.
            hooks.append(model.model.layers[0].mlp.down_proj.weight.register_hook(fail))
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "score_tokens", short)
        cut, cut_weights = train(exact=False, **settings)
    assert failures
    assert tools.relative(cut_weights, weights) < 1e-5
    tools.assert_like(cut.state.log_history, whole.state.log_history, 1e-4)
