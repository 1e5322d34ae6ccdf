"""Runs of several decode steps, and probe results that are kept between sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from noted_calls import note_calls, note_results
from torch import nn

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.native import NativeEngine, session
from groupgrad.engines.native import engine as engine_module
from groupgrad.engines.native.cpp_step import CompiledStep
from groupgrad.kernels import library, status
from groupgrad.scoring.fused_modules import compiled_parts

OPTIONS = SamplingOptions(max_new_tokens=90, eos_ids=(1, 3), pad_id=0, temperature=1.3)

pytestmark = pytest.mark.skipif(library() is None, reason=status())


@pytest.fixture
def model(build: Callable[..., Any]) -> Any:
    return build("qwen3", vocab_size=301, max_position_embeddings=512)


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """Number of steps of each run of several."""
    return note_results(monkeypatch, CompiledStep, "sample", lambda tokens, *_: len(tokens))


def requests() -> list[Request]:
    return [Request([5, 6 + i // 4, 7], i, 5 + 17 * (i % 6)) for i in range(20)]


def step_by_step(model: Any, monkeypatch, **bounds: Any) -> list[Sample]:
    with monkeypatch.context() as patch:
        patch.setattr(session, "RUN_SECONDS", 1e-9)
        return NativeEngine(model, **bounds).sample(requests(), OPTIONS)


@pytest.mark.parametrize("bounds", [{}, {"max_rows": 5}, {"kv_memory": 150 * 2 * 2 * 2 * 8 * 4}])
def test_a_run_of_steps_gives_what_single_steps_give(bounds: dict[str, Any], model, runs, monkeypatch):
    expected = step_by_step(model, monkeypatch, **bounds)
    assert not runs
    monkeypatch.setattr(session, "RUN_SECONDS", 10.0)
    engine = NativeEngine(model, **bounds)
    actual = engine.sample(requests(), OPTIONS)
    # Equal to the last bit, since rows do not depend on their neighbours.
    assert actual == expected
    assert {sample.finish_reason for sample in actual} == {"eos", "length"}
    assert max(runs) > 4
    assert sum(runs) > engine.statistics.num_steps / 2
    assert engine.statistics.num_decoded == sum(len(sample.ids) - 1 for sample in actual)


class Clock:
    """A clock that advances by a fixed time at each reading."""

    def __init__(self, seconds: float):
        self._seconds, self._now = seconds, 0.0

    def perf_counter(self) -> float:
        self._now += self._seconds
        return self._now


def test_a_run_lasts_as_long_as_it_should(model, runs, monkeypatch):
    monkeypatch.setattr(session, "RUN_SECONDS", 4 / 64)
    monkeypatch.setattr(session, "time", Clock(1 / 64))
    options = SamplingOptions(max_new_tokens=60, pad_id=0)
    with NativeEngine(model).session(options) as under_way:
        under_way.submit(Request([5, 6], 0, 60))
        # Each run takes 1/64 s by this clock: a step of the first one that long, of the next ones a 4th and a 16th of
        # that. Before the last run the row has 2 + 4 + 16 of its tokens.
        for _ in range(4):
            under_way.advance()
        assert runs == [4, 16, 38]
        # With more rows a single step measures the new duration first.
        for seed in range(3):
            under_way.submit(Request([5, 7], seed, 60))
        runs.clear()
        under_way.advance()
        assert runs == []
        under_way.advance()
    assert runs == [4]


def test_who_comes_is_looked_after_when_it_has_waited_long_enough(model, monkeypatch):
    """Beside 20 rows a single new request waits for eight steps, however long a run could be."""
    monkeypatch.setattr(session, "RUN_SECONDS", 10.0)
    engine = NativeEngine(model)
    with engine.session(SamplingOptions(max_new_tokens=400, pad_id=0)) as under_way:
        for seed in range(20):
            under_way.submit(Request([5, 6], seed, 400))
        for _ in range(3):
            under_way.advance()
        before = engine.statistics.num_steps
        late = under_way.submit(Request([5, 7], 30, 1))
        ended: list[int] = []
        while not ended:
            ended += [ticket for ticket, _ in under_way.advance()]
    assert ended == [late]
    # It finishes with its admission.
    assert 8 < engine.statistics.num_steps - before <= 8 + 64


def test_norms_that_a_training_pass_left_behind_are_computed_directly(model, runs):
    model.gradient_checkpointing = True
    with compiled_parts(model):
        pass
    assert "forward" in model.model.norm.__dict__
    NativeEngine(model).sample(requests(), OPTIONS)
    assert runs


@pytest.mark.parametrize("change", ["scaling", "sliding_window", "autocast", "dtype", "module"])
def test_a_model_that_may_compute_something_else_is_looked_at_anew(change: str, model, monkeypatch):
    engine, probes = NativeEngine(model), note_calls(monkeypatch, engine_module, "last_logits")

    def open_session() -> None:
        with engine.session(OPTIONS):
            pass

    open_session()
    open_session()
    assert len(probes) == 1
    if change == "dtype":
        model.bfloat16()
    elif change == "module":
        old = model.model.layers[1].mlp.up_proj
        model.model.layers[1].mlp.up_proj = nn.Linear(old.in_features, old.out_features)
    elif change != "autocast":
        setattr(model.model.layers[1].self_attn, change, 7)
    with torch.autocast("cpu", enabled=change == "autocast"):
        open_session()
    assert len(probes) == 2


@pytest.mark.parametrize("options", [{"stop_strings": ["ab"]}, {"top_k": 5}, {"do_sample": False}])
def test_where_a_choice_needs_more_steps_are_made_one_by_one(options: dict[str, Any], model, runs):
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "".join("ab"[token % 2] for token in ids)

    engine = NativeEngine(model, tokenizer=Tokenizer())
    engine.sample(requests(), SamplingOptions(max_new_tokens=30, pad_id=0, extra=options))
    assert not runs


def test_the_first_generation_batch_is_like_all_others(model):
    engine = NativeEngine(model)
    assert engine.sample(requests(), OPTIONS) == engine.sample(requests(), OPTIONS)
