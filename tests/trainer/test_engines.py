"""Sampling and scoring of a trainer's model by its engine."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from noted_calls import note_calls
from transformers.generation import ContinuousBatchingManager

from groupgrad.engines.native import NativeEngine
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.errors import ConfigError
from groupgrad.kernels import threads
from groupgrad.kernels.compile import openmp_runtime


def test_both_engines_train_to_the_same_weights(train, tools):
    """The native engine is the default, and says how far it is from training."""
    native, other = (train(rollout_engine=name, optim="sgd", learning_rate=0.1) for name in ("auto", "transformers"))
    assert isinstance(native.engine, NativeEngine) and isinstance(other.engine, TransformersEngine)
    gaps = [entry["sampling/logp_mismatch"] for entry in native.state.log_history if "loss" in entry]
    assert len(gaps) == 3 and all(0 <= gap <= 1e-5 for gap in gaps)
    assert tools.relative(tools.weights(other.model), tools.weights(native.model)) < 1e-5


def test_engine_kv_memory_bounds_the_sampler(train, make_trainer, tools):
    """2 layers, 2 heads of 8, float32: 512 bytes a token. Sampling in turns changes no text."""
    weights, waited = [], []
    for memory in (None, "4KiB"):
        trainer = train(engine_kv_memory=memory, optim="sgd", learning_rate=0.1, max_steps=1)
        weights.append(tools.weights(trainer.model))
        waited.append(trainer.engine.statistics.num_waited + trainer.engine.statistics.num_preempted)
        assert memory is None or trainer.engine.statistics.peak_bytes <= 4 * 1024
    assert waited[0] == 0 < waited[1]
    assert tools.relative(weights[1], weights[0]) < 1e-5
    with pytest.raises(ValueError, match="set engine_kv_memory to at least"):
        train(engine_kv_memory="1KB", rollout_engine="native")
    with pytest.raises(ValueError, match=r"engine_kv_memory='much' is no amount of bytes"):
        make_trainer(engine_kv_memory="much")


ONLY_GENERATE = {"num_beams": 2, "length_penalty": 0.5, "early_stopping": True, "no_repeat_ngram_size": 2}


def test_beams_are_searched_by_generate(make_trainer, make_policy, monkeypatch, caplog):
    """Every call of `generate` in a run has the options, and one line names the engine that has them."""
    policy = make_policy()
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(model=policy, generation_kwargs=ONLY_GENERATE, max_steps=1)
    lines = [line for record in caplog.records if "is sampled by generate" in (line := record.getMessage())]
    assert len(lines) == 1
    assert lines[0].endswith(
        f"the native engine has no {', '.join(ONLY_GENERATE)}, which rollout_engine='transformers' has"
    )
    names = [*ONLY_GENERATE, "do_sample"]
    note = lambda *_, generation_config, **__: {name: getattr(generation_config, name) for name in names}  # noqa: E731
    seen = note_calls(monkeypatch, type(policy), "_beam_search", note)
    trainer.train()
    assert seen
    assert all(options == {**ONLY_GENERATE, "do_sample": True} for options in seen)
    with pytest.raises(ConfigError, match="the native engine has no num_beams"):
        make_trainer(generation_kwargs={"num_beams": 2}, rollout_engine="native")


def test_a_value_that_an_engine_cannot_use_is_refused_before_a_run(make_trainer):
    for option in ({"sequence_bias": 5}, {"bad_words_ids": [5]}, {"exponential_decay_length_penalty": 5}):
        text = f"generation_kwargs has {{'{next(iter(option))}': .*nothing can be sampled .*take it out"
        with pytest.raises(ConfigError, match=text):
            make_trainer(generation_kwargs=option)


@pytest.mark.filterwarnings("ignore:use_transformers_paged has a new name")
def test_paged_generation_samples_a_run(make_trainer, make_policy, tools, monkeypatch):
    """Each generation batch goes through transformers' manager; with one likely token a run is the ordinary one."""
    results = []
    managers = note_calls(monkeypatch, ContinuousBatchingManager, "add_request", lambda self, *_, **__: self)
    further = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 2, "top_k": 1, "entropy_coef": 1.0}
    paged = {"use_transformers_paged": True, "transformers_continuous_batching_config": {"page_size": 8}}
    for engine in (paged, {}):
        policy, sampled = make_policy(), []
        start = tools.weights(policy)

        def reward(completion_ids, sampled=sampled, **kwargs):
            sampled.extend(completion_ids)
            return [float(len(ids)) for ids in completion_ids]

        trainer = make_trainer(model=policy, reward_funcs=reward, **engine, **further)
        parameters, _ = list(policy.parameters()), managers.clear()
        trainer.train()
        assert all(one is other for one, other in zip(policy.parameters(), parameters))
        assert tools.relative(tools.weights(policy), start) > 1e-3
        assert len({id(manager) for manager in managers}) == (2 if engine else 0)
        assert all(manager.continuous_batching_config.page_size == 8 for manager in managers)
        assert policy.config._attn_implementation == "sdpa"
        results.append((sampled, tools.weights(policy)))
    assert results[0][0] == results[1][0]
    assert tools.relative(results[0][1], results[1][1]) < 1e-5


@pytest.mark.skipif("libgomp" not in (openmp_runtime() or ""), reason="torch runs on another OpenMP runtime")
def test_a_trainer_limits_the_spinning_of_waiting_threads(make_trainer, monkeypatch):
    monkeypatch.setattr(threads, "_watched_process", None)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    torch.set_num_threads(2)
    make_trainer()
    torch.set_num_threads(1)
    assert threads._watched_process == os.getpid()
