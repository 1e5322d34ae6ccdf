"""Sampling that runs out of memory goes on with fewer rows at a time, and draws the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from sample_checks import drained
from tiny_hybrids import make_hybrid

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine, kv_cache, runner
from groupgrad.engines.native import session as native_session
from groupgrad.engines.native.sampler import Sampler
from groupgrad.engines.native.scheduler import Scheduler

OPTIONS = SamplingOptions(max_new_tokens=12, eos_ids=(1,), pad_id=0)
REQUESTS = [Request([5, 6, 7, 8 + i // 2], seed=i, max_new_tokens=12) for i in range(6)]


class Memory:
    """Fails where `is_too_much` says so, given the name of the place, the number of its call and the rows that run."""

    def __init__(self, is_too_much: Callable[[str, int, int], bool]):
        self.is_too_much, self.num_calls, self.num_failed = is_too_much, 0, 0
        self.scheduler: Scheduler | None = None

    def take(self, place: str) -> None:
        self.num_calls += 1
        rows = 0 if self.scheduler is None else self.scheduler.num_tried
        if self.is_too_much(place, self.num_calls, rows):
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@contextmanager
def memory(monkeypatch: pytest.MonkeyPatch, is_too_much: Callable[[str, int, int], bool]) -> Iterator[Memory]:
    """Every pass, resize, copy and draw of a session takes from a `Memory` first."""
    device = Memory(is_too_much)

    def watch(owner: Any, name: str, place: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            device.take(place)
            return real(*args, **kwargs)

        patch.setattr(owner, name, watched)

    real_admit = Scheduler.admit

    def admit(scheduler: Scheduler) -> Any:
        device.scheduler = scheduler
        return real_admit(scheduler)

    with monkeypatch.context() as patch:
        watch(native_session, "last_logits", "prefill")
        watch(runner.EagerStep, "run", "decode")
        watch(runner.CompiledRun, "run", "decode")
        watch(kv_cache, "zeros_in_large_pages", "resize")
        for name in ("offload", "restore", "begin_suffixes"):
            watch(kv_cache.KVCache, name, name)
        for name in ("add", "choose", "take_out"):
            watch(Sampler, name, name)
        patch.setattr(Scheduler, "admit", admit)
        yield device


@pytest.fixture(autouse=True)
def _warn_again():
    native_session._warn_once.cache_clear()


def texts(model: Any, options: SamplingOptions = OPTIONS, **bounds: Any) -> list[Any]:
    samples = NativeEngine(model, **bounds).sample(REQUESTS, options)
    return [(sample.ids, sample.finish_reason, sample.logprobs) for sample in samples]


@pytest.mark.quick("qwen3-prefill", "qwen3_5-prefill")
@pytest.mark.parametrize("place", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_fewer_rows_run_at_a_time_and_the_texts_are_the_same(place, name, build, monkeypatch, caplog):
    model = build(name) if name == "qwen3" else make_hybrid(name)
    expected = texts(model)
    with (
        caplog.at_level(logging.WARNING, native_session.__name__),
        memory(monkeypatch, lambda where, _, rows: where == place and rows > 2) as device,
    ):
        found = texts(model)
    assert [(ids, reason) for ids, reason, _ in found] == [(ids, reason) for ids, reason, _ in expected]
    for (_, _, logprobs), (_, _, wanted) in zip(found, expected):
        assert logprobs == pytest.approx(wanted, abs=1e-5)
    assert device.num_failed == 2  # six rows, then three
    assert [record.message[:26] for record in caplog.records] == ["sampling so many rows at o"]


def conversation(engine: NativeEngine, options: SamplingOptions) -> list[list[int]]:
    """Two turns of each row; the second one continues the first."""
    found: dict[int, list[int]] = {}
    with engine.session(options) as session:
        rows = {session.submit(replace(request, keep=True)): request for request in REQUESTS}
        while session.num_open:
            for ticket, sample in session.advance():
                found[ticket] = sample.ids
                if (request := rows.get(ticket)) is not None:
                    prompt = [*request.prompt_ids, *sample.ids, 9, 10]
                    again = Request(prompt, seed=90 + request.seed, max_new_tokens=5, continues=ticket)
                    found[session.submit(again)] = []
    return sorted(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_whichever_allocation_fails_the_texts_are_the_same(penalty, build, monkeypatch):
    model, options = build("qwen3"), replace(OPTIONS, extra={"repetition_penalty": penalty})
    expected = conversation(NativeEngine(model), options)
    with memory(monkeypatch, lambda *_: False) as device:
        assert conversation(NativeEngine(model), options) == expected
    assert device.num_calls > 40
    calls, failed = range(1, device.num_calls + 1, 2 if penalty == 1.0 else 7), 0
    for call in calls:
        with memory(monkeypatch, lambda _, number, rows, call=call: number == call and rows > 1) as once:
            assert conversation(NativeEngine(model), options) == expected, f"call {call}"
        failed += once.num_failed
    assert failed > 0.5 * len(calls)  # where one row alone is left, nothing fails; how long that is depends on texts


def test_a_row_that_does_not_fit_alone_ends_the_sampling(build, monkeypatch):
    model = build("qwen3")
    with (
        memory(monkeypatch, lambda place, *_: place == "decode"),
        pytest.raises(RuntimeError, match=r"one row alone does not fit into memory .*lower max_completion_length"),
    ):
        texts(model)


def test_other_errors_are_raised_as_they_are(build, monkeypatch):
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    model = build("qwen3")
    monkeypatch.setattr(native_session, "last_logits", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        texts(model)


def test_a_bound_that_was_lowered_still_takes_what_the_user_allowed(build, monkeypatch):
    engine = NativeEngine(build("qwen3"), kv_memory=128 * 100)
    with (
        memory(monkeypatch, lambda place, _, rows: place == "decode" and rows > 2),
        engine.session(OPTIONS) as session,
    ):
        for request in REQUESTS:
            session.submit(request)
        drained(session)
        assert session._cache.max_tokens == 25
        session.submit(Request([5] * 20, seed=1, max_new_tokens=18))
        drained(session)
