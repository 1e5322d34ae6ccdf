"""The memory bound: sequences wait, are preempted and resume, and completions do not change."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_checks import assert_same_samples

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.native.kv_cache import CacheRoom, KVCache, LayerShape
from groupgrad.engines.native.scheduler import Scheduler
from groupgrad.engines.native.sequence import EngineSequence

OPTIONS = SamplingOptions(max_new_tokens=150, eos_ids=(1,), pad_id=0)
BYTES = 2 * 1 * (8 + 8) * 4
"""Per token in the models below: layers x heads x dims x float32."""


def make_cache(max_tokens: int) -> KVCache:
    return KVCache({0: LayerShape(1, 1, 1, torch.float32, torch.device("cpu"))}, max_tokens * 8)


@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("name", ["qwen3", "gemma4 (shared keys and values)"])
def test_when_memory_is_short_rows_wait_and_give_way_and_say_the_same(name: str, build):
    model = build(name, max_position_embeddings=256)
    prompts = ([5, 6, 7, 8, 9], [10, 11], [12, 13, 14])
    submitted = [Request(prompts[i // 3], i, 40 + 12 * i) for i in range(9)]
    options = replace(OPTIONS, eos_ids=())
    roomy = NativeEngine(model)
    expected = roomy.sample(submitted, options)
    assert (roomy.statistics.num_waited, roomy.statistics.num_preempted) == (0, 0)
    most = roomy.statistics.peak_bytes
    engine = NativeEngine(model, kv_memory=300 * BYTES)
    assert_same_samples(engine.sample(submitted, options), expected, absolute=2e-5, relative=0.0)
    statistics = engine.statistics
    assert statistics.num_waited > 0
    assert statistics.num_preempted > 0
    assert statistics.num_prefilled > sum(map(len, prompts))
    assert statistics.peak_bytes <= 300 * BYTES < most


def test_rows_that_end_make_place_at_once(build):
    """Finished rows make room for waiting ones: the number of steps is the work over the rows at a time, and a tail."""
    model = build("qwen3", max_position_embeddings=256)
    submitted = [Request([5, 6, 7], seed, 60) for seed in range(30)]
    engine = NativeEngine(model, max_rows=4)
    actual = engine.sample(submitted, OPTIONS)
    lengths = [len(s.ids) for s in actual]
    assert len(set(lengths)) > 5
    assert engine.statistics.num_decoded == sum(lengths) - 30
    assert engine.statistics.num_steps <= (sum(lengths) - 30) / 4 + max(lengths)
    assert_same_samples(actual, NativeEngine(model).sample(submitted, OPTIONS), absolute=2e-5, relative=0.0)


def test_a_row_that_can_never_fit_is_told_before_sampling(build):
    engine = NativeEngine(build("qwen3"), kv_memory=20 * BYTES)
    need = 3 + 18
    with pytest.raises(ValueError, match=rf"engine_kv_memory={20 * BYTES} .* 20 tokens.*at least {need * BYTES} "):
        engine.sample([Request([5], 0, 4), Request([5, 6, 7], 0, 18)], OPTIONS)
    assert engine.statistics.num_steps == 0
    NativeEngine(build("qwen3"), kv_memory=need * BYTES).sample([Request([5, 6, 7], 0, 18)] * 2, OPTIONS)


def test_one_long_prompt_does_not_pad_all_others(build):
    """Prompts of 900 and of 1 to 3 tokens: in slots of equal size they would take 30 x 900 places."""
    model = build("qwen3", max_position_embeddings=1024)
    submitted = [Request([5 + i % 30] * (900 if i == 0 else 1 + i % 3), i, 3) for i in range(30)]
    engine = NativeEngine(model)
    actual = engine.sample(submitted, replace(OPTIONS, eos_ids=()))
    assert engine.statistics.peak_bytes < (2 * 1000 + 8192 + 30 * 40) * BYTES
    alone = [NativeEngine(model).sample([r], replace(OPTIONS, eos_ids=()))[0] for r in submitted]
    assert_same_samples(actual, alone, absolute=2e-5, relative=0.0)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12),
    extra=st.integers(0, 200),
    max_rows=st.one_of(st.none(), st.integers(1, 4)),
)
def test_a_schedule_finishes_every_row_within_the_bound(rows: Any, extra: int, max_rows: int | None):
    """A dry run without a model: each running sequence gets a token per step and ends after its own number."""
    submitted = [Request([g] * (1 + 3 * g), 0, max(budget, true)) for g, budget, true in rows]
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in submitted)
    cache = make_cache(longest + extra)
    scheduler = Scheduler(cache, max_rows)
    for ticket, request in enumerate(submitted):
        scheduler.add(ticket, request)
    done: list[EngineSequence] = []

    def sample_token(sequences: list[EngineSequence]) -> None:
        for sequence in sequences:
            sequence.sampled_ids.append(0)
        finished = [s for s in sequences if len(s.sampled_ids) >= rows[s.ticket][2]]
        done.extend(finished)
        scheduler.finish(finished)

    for _ in range(3000):
        admitted = scheduler.admit().sequences
        if not scheduler.running:
            break
        sample_token([sequence for sequence in admitted if not sequence.sampled_ids])
        if scheduler.running:
            scheduler.make_room()
        assert max_rows is None or len(scheduler.running) <= max_rows
        assert cache.suffixes.capacity + cache.prompts.capacity <= cache.max_tokens
        assert cache.suffixes.num_slots >= len(scheduler.running)
        sample_token(list(scheduler.running))
    assert sorted(sequence.ticket for sequence in done) == list(range(len(rows)))
    assert cache.peak_tokens <= cache.max_tokens


@pytest.mark.parametrize(("num_turns", "sizes"), [(6, [64]), (20, [64, 128, 192])])
def test_sessions_have_room_for_their_next_turns(num_turns: int, sizes: list[int]):
    """A dry run of 6 sessions with turns of 4 tokens and replies of 5, each away for 0 to 2 steps between its turns.

    Suffixes get up to 9 * num_turns - 6 stored tokens. Each size has 63 spare tokens beyond what was needed first. All
    6 slots stay, however many sessions are away.
    """
    cache = make_cache(10_000)
    scheduler = Scheduler(cache, None)
    asked, sizes_found = [], []
    due = {0: [(session, Request([5] * 3, 0, 4, keep=True)) for session in range(6)]}
    for step in itertools.count():
        for session, request in due.pop(step, []):
            scheduler.add(len(asked), request)
            asked.append(session)
        for sequence in scheduler.admit().sequences:
            sequence.sampled_ids.append(7)
        if scheduler.running:
            scheduler.make_room()
        size = cache.suffixes.num_slots, cache.suffixes.slot_size
        sizes_found += [size] if size not in sizes_found[-1:] else []
        for sequence in scheduler.running:
            sequence.sampled_ids.append(7)
        finished = [sequence for sequence in scheduler.running if len(sequence.sampled_ids) == 4]
        scheduler.finish(finished)
        for sequence in finished:
            session, ids = asked[sequence.ticket], [*sequence.request.prompt_ids, 7, 7, 7, 7, *[9] * 5]
            if (len(ids) - 3) // 9 < num_turns:
                then = Request(ids, 0, 4, continues=sequence.ticket, keep=True)
                due.setdefault(step + 1 + session % 3, []).append((session, then))
        if not due and not scheduler.running and not scheduler.gathering:
            break
    assert len(asked) == 6 * num_turns
    assert sizes_found == [(6, size) for size in sizes]


def test_rows_without_next_turns_get_no_more_room_than_they_may_fill():
    cache = make_cache(1000)
    scheduler = Scheduler(cache, None)
    for ticket in range(6):
        scheduler.add(ticket, Request([5] * 3, 0, 4))
    scheduler.admit()
    assert (cache.suffixes.num_slots, cache.suffixes.slot_size) == (6, 4)


def test_stored_tokens_survive_a_change_of_size():
    cache = make_cache(1000)
    cache.reserve(CacheRoom(2, 3, 1, 4, max_suffix_length=100), CacheRoom(0, 0, 0, 0))
    cache.suffixes.tensors[0][0][:2, 0, :3, 0] = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    cache.prompts.tensors[0][1][0, 0, :4, 0] = torch.arange(4.0)
    assert cache.reserve(CacheRoom(5, 80, 2, 9, max_suffix_length=100), CacheRoom(2, 3, 1, 4))
    assert cache.suffixes.tensors[0][0][:2, 0, :3, 0].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert cache.suffixes.tensors[0][0][2:].abs().sum() == 0.0
    assert cache.prompts.tensors[0][1][0, 0, :4, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not cache.reserve(CacheRoom(20, 50, 2, 9, max_suffix_length=100), CacheRoom(5, 80, 2, 9))
    cache.suffixes.move([(1, 0)], 3)
    assert cache.suffixes.tensors[0][0][0, 0, :3, 0].tolist() == [4.0, 5.0, 6.0]
