"""Sessions: requests arrive at any time, and a continued turn costs its new tokens only and samples the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from base_fixtures import build as build_model
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_checks import assert_same_samples, drained
from tiny_hybrids import make_hybrid

from groupgrad.engines.base import BatchSession, Request, Sample, SamplingOptions, Session
from groupgrad.engines.native import NativeEngine, scheduler
from groupgrad.engines.native import session as native_session
from groupgrad.engines.stop_strings import StopStrings
from groupgrad.engines.transformers import TransformersEngine

OPTIONS = SamplingOptions(max_new_tokens=6, eos_ids=(1,), pad_id=0)
ENDLESS = replace(OPTIONS, eos_ids=())
GREEDY = replace(OPTIONS, extra={"do_sample": False})
LONG, SHORT = [5, 6, 7, 8, 9, 10, 11], [12, 13]
BYTES = 2 * 1 * (8 + 8) * 4
"""Per token in "qwen3": layers x heads x dims x float32."""


@dataclass
class Turn:
    """Tokens before a turn (the prompt or a reply), and how the turn is sampled."""

    new_ids: list[int]
    seed: int
    budget: int


@dataclass
class SampledTurn:
    """A turn's request and sample."""

    request: Request
    sample: Sample


@dataclass
class Conversation:
    """A row of several turns, which become requests one after the other."""

    turns: Sequence[Turn]
    keep: bool = True
    sampled: list[SampledTurn] = field(default_factory=list)
    ticket: int | None = None
    """Ticket of the last turn."""

    @property
    def is_over(self) -> bool:
        return len(self.sampled) == len(self.turns)

    def request(self) -> Request:
        turn = self.turns[len(self.sampled)]
        before = [*self.sampled[-1].request.prompt_ids, *self.sampled[-1].sample.ids] if self.sampled else []
        continues = self.ticket if self.keep and self.sampled else None
        return Request([*before, *turn.new_ids], turn.seed, turn.budget, continues, self.keep)


def run(session: Session, rows: Sequence[Conversation]) -> None:
    """Samples all conversations at once; each submits its next turn as soon as one has ended."""
    open_rows: dict[int, Conversation] = {}
    for row in rows:
        row.ticket = session.submit(row.request())
        open_rows[row.ticket] = row
    while session.num_open:
        for ticket, sample in session.advance():
            row = open_rows.pop(ticket, None)
            if row is None:
                continue
            row.sampled.append(SampledTurn(row.request(), sample))
            if not row.is_over:
                row.ticket = session.submit(row.request())
                open_rows[row.ticket] = row
    assert not open_rows


def assert_sampled_as_if_alone(
    model: Any, rows: Sequence[Conversation], options: SamplingOptions, tokenizer: Any = None
) -> None:
    """Each turn, sampled alone from its whole context, has the same tokens and log-probs."""
    for row in rows:
        assert row.is_over
        for turn, sampled in zip(row.turns, row.sampled):
            request = replace(sampled.request, continues=None, keep=False)
            assert (request.seed, request.max_new_tokens) == (turn.seed, turn.budget)
            assert_same_samples([sampled.sample], NativeEngine(model, tokenizer=tokenizer).sample([request], options))


def conversations() -> list[Conversation]:
    """Two groups of two rows and a row alone; three, two and one turns; one reply is empty."""
    first = [(LONG, 6), (LONG, 3), (SHORT, 5), (SHORT, 1), ([14], 4)]
    later = [[([20, 21, 22], 4), ([23], 5)], [([24] * 9, 3), ([], 2)], [([25, 26], 6)], [([27], 1), ([28, 29], 7)], []]
    return [
        Conversation([Turn(ids, 100 * i + j, budget) for j, (ids, budget) in enumerate([start, *rest])])
        for i, (start, rest) in enumerate(zip(first, later))
    ]


# ------------------------------------------------------------------------------------------- equal completions


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", OPTIONS),
        ("qwen3", GREEDY),
        ("gemma2 (soft caps)", OPTIONS),
        ("mistral (sliding window)", replace(ENDLESS, temperature=0.7)),
        ("gpt2", OPTIONS),
        ("gpt-oss (experts, sinks)", OPTIONS),
    ],
)
def test_a_continued_turn_says_what_the_whole_context_does(name: str, options: SamplingOptions, build):
    model, rows = build(name), conversations()
    engine = NativeEngine(model)
    with engine.session(options) as session:
        run(session, rows)
    assert engine.statistics.num_restored > 0
    assert_sampled_as_if_alone(model, rows, options)


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 5.0, "temperature": 0.7},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"eos_ids": tuple(range(1, 30)), "extra": {"min_new_tokens": 3}},
        {"extra": {"begin_suppress_tokens": list(range(20, 40))}},
    ],
)
def test_options_count_for_each_turn_and_penalties_for_the_whole_context(changes: dict[str, Any], build):
    model, options = build("qwen3"), replace(OPTIONS, **changes)
    plain, rows = conversations(), conversations()
    with NativeEngine(model).session(OPTIONS) as session:
        run(session, plain)
    with NativeEngine(model).session(options) as session:
        run(session, rows)
    assert_sampled_as_if_alone(model, rows, options)
    assert [s.sample.ids for t in rows for s in t.sampled] != [s.sample.ids for t in plain for s in t.sampled]


def test_a_stop_string_ends_the_turn_that_it_stands_in(make_model, make_tokenizer):
    model, tokenizer = make_model().eval(), make_tokenizer()
    options = replace(ENDLESS, extra={"stop_strings": ["a", "b"], "suppress_tokens": [0, 1, 2, 3, *range(10, 100)]})
    rows = [Conversation([Turn([5, 6], i, 8), Turn([4, 5], i + 50, 8)]) for i in range(8)]
    with NativeEngine(model, tokenizer=tokenizer).session(options) as session:
        run(session, rows)
    assert_sampled_as_if_alone(model, rows, options, tokenizer)
    second = [row.sampled[1].sample for row in rows]
    assert any(len(s.ids) > 1 for s in second), "stop strings in the earlier turn and in the reply do not count"
    assert any(s.finish_reason == "eos" for s in second)


@pytest.mark.parametrize("name", ["qwen3", "hybrid"])
def test_a_request_ends_at_its_own_stop_texts(name: str, build, make_tokenizer):
    """Its tokens are those of the request without them, up to the one that completes a text; it can be continued."""
    model = make_hybrid("qwen3_next") if name == "hybrid" else build(name)
    tokenizer = make_tokenizer()
    engine, letters = NativeEngine(model, tokenizer=tokenizer), [0, 1, 2, 3, *range(10, model.config.vocab_size)]
    options = replace(ENDLESS, extra={"suppress_tokens": letters})
    kinds: list[tuple[str, ...]] = [(), ("a", "bc"), ("b", "ca")]
    rows = [Request(SHORT, number, 20, keep=True, stops=kinds[number % 3]) for number in range(9)]
    with engine.session(options) as session:
        for row in rows:
            session.submit(row)
        found = drained(session)
        for number, row in enumerate(rows):
            context = [*row.prompt_ids, *found[number].ids, 5]
            session.submit(Request(context, 50 + number, 4, continues=number))
        later = drained(session)
        assert not session._own_stops
    plain = engine.sample([replace(row, stops=()) for row in rows], options)
    ends = [StopStrings(row.stops, tokenizer).end(whole.ids) for row, whole in zip(rows, plain)]
    assert sum(end is not None for end in ends) >= 4
    for number, (end, whole) in enumerate(zip(ends, plain)):
        expected = replace(whole, ids=whole.ids[:end], finish_reason="length" if end is None else "eos")
        assert_same_samples([found[number]], [cut_scores(expected)])
        context = [*SHORT, *found[number].ids, 5]
        assert_same_samples([later[9 + number]], engine.sample([Request(context, 50 + number, 4)], options))


def cut_scores(sample: Sample) -> Sample:
    """The sample with the scores of its ids alone."""
    assert sample.logprobs is not None and sample.entropies is not None
    count = len(sample.ids)
    return replace(sample, logprobs=sample.logprobs[:count], entropies=sample.entropies[:count])


def test_an_engine_of_batches_has_the_same_texts(build):
    model, ours, theirs = build("qwen3"), conversations(), conversations()
    with NativeEngine(model).session(OPTIONS) as session:
        assert not isinstance(session, BatchSession)
        run(session, ours)
    with TransformersEngine(model).session(OPTIONS) as session:
        assert isinstance(session, BatchSession)
        assert (session.num_open, session.advance()) == (0, [])
        run(session, theirs)
    first, second = ([sampled for row in rows for sampled in row.sampled] for rows in (ours, theirs))
    assert [turn.request.prompt_ids for turn in first] == [turn.request.prompt_ids for turn in second]
    assert_same_samples([turn.sample for turn in first], [turn.sample for turn in second])


# ------------------------------------------------------------------------------------------- costs


def test_a_turn_costs_its_new_tokens_only(build):
    """Prompts are computed once; each later turn adds its reply and the token sampled last, which was not computed."""
    rows = [
        Conversation([Turn(LONG, 1, 6), Turn([20, 21, 22], 2, 5), Turn([23], 3, 4)]),
        Conversation([Turn(LONG, 4, 6), Turn([24, 25], 5, 5)]),
        Conversation([Turn(SHORT, 6, 1), Turn([26] * 10, 7, 3)]),
    ]
    engine = NativeEngine(build("qwen3"))
    with engine.session(ENDLESS) as session:
        run(session, rows)
        assert engine.statistics.num_prefilled == 7 + 2 + (1 + 3) + (1 + 1) + (1 + 2) + (1 + 10)
        assert engine.statistics.num_restored == 5 + (5 + 4 + 4) + 5 + 0
        assert engine.statistics.num_decoded == (5 + 4 + 3) + (5 + 4) + (0 + 2)
        assert (engine.statistics.num_preempted, engine.statistics.num_waited) == (0, 0)


def test_what_new_prompts_begin_with_alike_is_computed_once(build):
    """In three turns: one prompt, what begins as it does, and the one that has 80 tokens more in common with those.

    Ten tokens more are not worth a turn.
    """
    model = build("qwen3", max_position_embeddings=256)
    engine, other = NativeEngine(model), [9] * 70
    prompts = [[*STORED, 7], [*STORED[:70], 8, 8], [*STORED, *other, 44], [*STORED, *other, 45, 46], [44], [45, 9]]
    requests = [Request(prompt, seed, 6) for seed, prompt in enumerate(prompts)]
    samples = engine.sample(requests, ENDLESS)
    assert engine.statistics.num_prefilled == 72 + 11 + (10 + 71) + 2 + 1 + 2
    for request, sample in zip(requests, samples):
        assert_same_samples([sample], NativeEngine(model).sample([request], ENDLESS))


@pytest.mark.parametrize("prompt", [LONG, [14]])
def test_a_prompt_that_is_stored_is_joined(prompt: list[int], build):
    """While a prompt is stored, a new request costs its last token, for the logits after it."""
    model = build("qwen3")
    engine = NativeEngine(model)
    submitted = [Request(prompt, seed, 4, keep=seed == 1) for seed in range(4)]
    actual: dict[int, Sample] = {}
    costs = []
    with engine.session(ENDLESS) as session:
        for request in submitted[:2]:
            session.submit(request)
        for request in submitted[2:]:
            actual.update(session.advance())
            costs.append(engine.statistics.num_prefilled)
            session.submit(request)
        actual.update(drained(session))
        costs.append(engine.statistics.num_prefilled)
        kept = session.submit(replace(submitted[0], seed=9))
        actual.update(session.advance())
        costs.append(engine.statistics.num_prefilled)
        actual.update(drained(session))
        session.release(1)
        session.submit(submitted[0])
        session.advance()
        costs.append(engine.statistics.num_prefilled)
    size = len(prompt)
    assert costs == [size, size + 1, size + 2, size + 3, 2 * size + 3]
    alone = [NativeEngine(model).sample([r], ENDLESS)[0].ids for r in [*submitted, replace(submitted[0], seed=9)]]
    assert [actual[i].ids for i in range(4)] == alone[:4]
    assert actual[kept].ids == alone[4]


def test_tables_and_groups_do_not_grow_with_the_turns(build):
    engine = NativeEngine(build("qwen3", max_position_embeddings=512))
    with engine.session(replace(ENDLESS, repetition_penalty=1.5)) as session:
        for number in range(10):
            run(session, [Conversation([Turn([5 + i, 6 + number], i, 3), Turn([7], i, 3)]) for i in range(3)])
        assert session._sampler.logprobs.shape == (3, 3)
        for ticket in range(60):
            session.release(ticket)
        left = session._scheduler
        assert not (left._retained or left._groups_by_key or left.groups)
        assert left.cache.offloaded_tokens == 0
        run(session, [Conversation([Turn([5], i, 20)]) for i in range(4)])
        assert session._sampler.logprobs.shape == (6, 20)


def test_what_is_kept_counts_as_memory_until_it_is_released(build):
    engine = NativeEngine(build("qwen3"))
    with engine.session(ENDLESS) as session:
        submitted = [Request(LONG, 0, 5, keep=True), Request(SHORT, 1, 3, keep=True), Request(SHORT, 2, 4)]
        for request in submitted:
            session.submit(request)
        drained(session)
        cache = session._scheduler.cache
        assert cache.offloaded_tokens == 4 + 2
        assert engine.statistics.peak_bytes >= (6 + cache.suffixes.capacity + cache.prompts.capacity) * BYTES
        session.release(0)
        session.release(0)
        session.release(2)
        session.release(77)
        assert cache.offloaded_tokens == 2
        assert [group.prompt_ids for group in session._scheduler.groups] == [SHORT]
        with pytest.raises(ValueError, match="continues=0, but nothing is kept"):
            session.submit(Request([*LONG, 3, 3, 3, 3, 3], 0, 5, continues=0))


@pytest.fixture
def single_steps(monkeypatch):
    """The scheduler runs after each step."""
    monkeypatch.setattr(native_session, "RUN_SECONDS", 1e-9)


@pytest.mark.parametrize(("num_new", "num_waited"), [(1, 8), (2, 8), (3, 0)])
def test_rows_that_come_wait_a_few_steps_for_each_other(num_new: int, num_waited: int, build, single_steps):
    """Beside 20 running rows three requests enter at once, fewer wait for eight steps."""
    with NativeEngine(build("qwen3")).session(ENDLESS) as session:
        for seed in range(20):
            session.submit(Request(LONG, seed, 30))
        session.advance()
        tickets = [session.submit(Request(SHORT, seed, 1)) for seed in range(num_new)]
        for _ in range(num_waited):
            assert session.advance() == []
        assert [ticket for ticket, _ in session.advance()] == tickets


# ------------------------------------------------------------------------------------------- memory pressure


@pytest.mark.quick("180")
@pytest.mark.parametrize("name", ["qwen3", "mistral (sliding window)"])
@pytest.mark.parametrize("tokens", [180, 300])
def test_when_memory_is_short_what_is_kept_goes_and_rows_give_way_and_say_the_same(name: str, tokens: int, build):
    """Only second turns are long enough to exceed the headroom of admission."""
    model = build(name, max_position_embeddings=256)
    rows = [
        Conversation(
            [Turn([LONG, SHORT][i % 2], i, 6 + 2 * i), Turn([20] * (3 + i), 50 + i, 90 + i), Turn([21], 90 + i, 9 - i)]
        )
        for i in range(8)
    ]
    engine = NativeEngine(model, kv_memory=tokens * BYTES)
    with engine.session(ENDLESS) as session:
        run(session, rows)
    statistics = engine.statistics
    assert statistics.peak_bytes <= tokens * BYTES
    assert statistics.num_waited > 0
    assert statistics.num_preempted > 0
    replies = sum(1 + len(turn.new_ids) for row in rows for turn in row.turns[1:])
    assert statistics.num_prefilled > len(LONG) + len(SHORT) + replies
    assert_sampled_as_if_alone(model, rows, ENDLESS)


STORED = [3 + i % 40 for i in range(80)]


@pytest.mark.parametrize(
    ("name", "prompt", "num_computed"),
    [
        ("qwen3", [*STORED, 44, 45], 2),
        ("qwen3", STORED[:70], 1),
        ("qwen3", [*STORED[:66], 44, 45, 46], 3),
        ("qwen3", [*STORED[:64], 44], 1),
        ("qwen3", [*STORED[:63], 44], 64),
        ("hybrid", [*STORED, 44, 45], 82),  # its states are known behind the last token only
    ],
    ids=["longer", "shorter", "apart", "enough in common", "little in common", "recurrent"],
)
def test_what_a_stored_prompt_begins_with_too_is_copied(name: str, prompt: list[int], num_computed: int, build):
    model = make_hybrid("qwen3_next") if name == "hybrid" else build(name)
    engine = NativeEngine(model)
    requests = [Request(STORED, 3, 6, keep=True), Request([9, *STORED], 4, 6, keep=True), Request(prompt, 5, 6)]
    with engine.session(ENDLESS) as session:
        samples = {}
        for request in requests:
            before = engine.statistics.num_prefilled
            session.submit(request)
            while session.num_open:
                samples.update(session.advance())
    assert engine.statistics.num_prefilled - before == num_computed
    assert_same_samples([samples[2]], NativeEngine(model).sample([requests[2]], ENDLESS))


def test_rows_that_come_are_worth_more_than_rows_that_may_come_back(build):
    """Room for one row only: the retained prefix of the first is dropped for the second, and computed again."""
    model = build("qwen3")
    engine = NativeEngine(model, kv_memory=30 * BYTES)
    rows = [Conversation([Turn(LONG, 0, 8), Turn([20, 21], 1, 8)]), Conversation([Turn([30] * 9, 2, 20)])]
    with engine.session(ENDLESS) as session:
        rows[0].ticket = session.submit(rows[0].request())
        while session.num_open:
            rows[0].sampled += [SampledTurn(rows[0].request(), sample) for _, sample in session.advance()]
        assert session._scheduler.cache.offloaded_tokens == 7
        run(session, rows[1:])
        run(session, [rows[0]])
    assert engine.statistics.num_restored == 0
    assert engine.statistics.num_prefilled == 7 + 9 + 7 + (8 + 2)
    assert_sampled_as_if_alone(model, rows, ENDLESS)


def test_what_waiting_rows_take_back_is_left_to_them_up_to_half_of_the_bound(build):
    """Beside a row of 40 tokens neither of two continuations fits; their 10 retained tokens stay."""
    model = build("qwen3")
    engine = NativeEngine(model, kv_memory=80 * BYTES)
    rows = [Conversation([Turn(SHORT, i, 6), Turn([20], 10 + i, 30)]) for i in range(2)]
    with engine.session(ENDLESS) as session:
        for row in rows:
            row.ticket = session.submit(row.request())
        while session.num_open:
            for ticket, sample in session.advance():
                rows[ticket].sampled.append(SampledTurn(rows[ticket].request(), sample))
        session.submit(Request([14], 5, 40))
        session.advance()
        run(session, rows)
    assert engine.statistics.num_waited > 0
    assert engine.statistics.num_restored == 5 + 5
    assert_sampled_as_if_alone(model, rows, ENDLESS)


def test_a_bound_that_nobody_set_stretches_for_a_long_row(build, monkeypatch):
    monkeypatch.setattr("groupgrad.engines.native.engine.free_bytes", lambda device: 20 * BYTES)
    model, rows = (
        build("qwen3"),
        [Conversation([Turn(LONG, 0, 8), Turn([20, 21], 1, 20)]), Conversation([Turn(SHORT, 3, 5)])],
    )
    with NativeEngine(model).session(ENDLESS) as session:
        run(session, rows)
    assert_sampled_as_if_alone(model, rows, ENDLESS)


# ------------------------------------------------------------------------------------------- aborted requests


@pytest.mark.parametrize("engine_type", [NativeEngine, TransformersEngine])
def test_an_aborted_request_never_finishes_and_others_say_the_same(engine_type: Any, build, single_steps):
    """One of a prompt's rows that has not begun, one that runs if the engine samples token by token, an unknown one."""
    model = build("qwen3")
    requests = [Request([LONG, SHORT][seed % 2], seed, 6) for seed in range(6)]
    with engine_type(model).session(ENDLESS) as session:
        tickets = [session.submit(request) for request in requests[:4]]
        session.abort([tickets[0], 99])
        assert session.num_open == 3
        samples = dict(session.advance())
        tickets += [session.submit(request) for request in requests[4:]]
        session.abort([*tickets[1:2], *tickets[5:]])
        samples |= drained(session)
        assert session.num_open == 0
    left = [2, 3, 4] if engine_type is NativeEngine else [1, 2, 3, 4]
    assert sorted(samples) == [tickets[number] for number in left]
    for number in left:
        assert_same_samples([samples[tickets[number]]], engine_type(model).sample([requests[number]], ENDLESS))


def test_an_aborted_continuation_takes_what_it_continued_along(build):
    with kept_row(build("qwen3")) as (session, context):
        ticket = session.submit(Request([*context, 20], 0, 3, continues=0))
        session.abort([ticket])
        assert (session.num_open, session._scheduler.cache.offloaded_tokens, session._scheduler.groups) == (0, 0, [])
        with pytest.raises(ValueError, match="continues=0, but nothing is kept"):
            session.submit(Request([*context, 20], 0, 3, continues=0))


# ------------------------------------------------------------------------------------------- errors


@contextmanager
def kept_row(model: Any, **bounds: int) -> Iterator[tuple[Any, list[int]]]:
    """A session with a retained request, ticket 0, and its context."""
    with NativeEngine(model, **bounds).session(ENDLESS) as session:
        session.submit(Request(SHORT, 0, 3, keep=True))
        yield session, [*SHORT, *drained(session)[0].ids]


def test_a_continuation_begins_with_what_it_continues(build):
    with kept_row(build("qwen3")) as (session, context):
        other = [*context[:3], context[3] + 1, *context[4:], 20]
        words = "continues=0, but prompt_ids does not begin with that request's prompt"
        with pytest.raises(ValueError, match=words):
            session.submit(Request(other, 0, 3, continues=0))
        with pytest.raises(ValueError, match=words):
            session.submit(Request(context[:4], 0, 3, continues=0))
        assert session.num_open == 0
        ticket = session.submit(Request([*context, 20], 0, 3, continues=0))
        assert [ticket, session.num_open] == [1, 1]


def test_only_what_is_kept_is_continued_and_once(build, single_steps):
    with kept_row(build("qwen3")) as (session, context):
        with pytest.raises(ValueError, match="continues=5, but nothing is kept"):
            session.submit(Request([*context, 20], 0, 3, continues=5))
        continuation = session.submit(Request([*context, 20], 0, 3, continues=0))
        with pytest.raises(ValueError, match="continues=0, but nothing is kept"):
            session.submit(Request([*context, 21], 0, 3, continues=0))
        for _ in range(2):
            with pytest.raises(ValueError, match=f"continues={continuation}, but nothing is kept"):
                session.submit(Request([*context, 20], 0, 3, continues=continuation))
            session.advance()
        with pytest.raises(ValueError, match="continues=0, but nothing is kept"):
            session.submit(Request([*context, 20], 0, 3, continues=0))
        drained(session)
        with pytest.raises(ValueError, match=f"continues={continuation}, but nothing is kept .* keep=True"):
            session.submit(Request([*context, 20, 3, 3, 3], 0, 3, continues=continuation))


def test_a_turn_that_can_never_fit_is_refused_and_the_session_goes_on(build):
    with kept_row(build("qwen3"), kv_memory=12 * BYTES) as (session, context):
        with pytest.raises(ValueError, match=rf"hold .* 12 tokens; a prompt of 6 tokens with 7 .* least {13 * BYTES} "):
            session.submit(Request([*context, 20], 0, 7, continues=0))
        with pytest.raises(ValueError, match="max_new_tokens=0"):
            session.submit(Request([*context, 20], 0, 0, continues=0))
        session.submit(Request([*context, 20], 0, 6, continues=0))
        drained(session)


def test_a_session_leaves_the_model_as_it_was_and_ends_with_its_block(build):
    model = build("qwen3").train()
    with pytest.raises(RuntimeError, match="stop"), NativeEngine(model).session(OPTIONS) as session:
        assert not any(module.training for module in model.modules())
        session.submit(Request(SHORT, 0, 3))
        session.advance()
        raise RuntimeError("stop")
    assert all(module.training for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.is_grad_enabled()
    with pytest.raises(ValueError, match="session is closed"):
        session.submit(Request(SHORT, 0, 3))
    with pytest.raises(ValueError, match="session is closed"):
        session.advance()


def test_sample_takes_requests_of_a_session_for_what_they_are(build):
    engine = NativeEngine(build("qwen3"))
    plain = engine.sample([Request(SHORT, 3, 4)], OPTIONS)
    assert engine.sample([Request(SHORT, 3, 4, continues=8, keep=True)], OPTIONS) == plain


# ------------------------------------------------------------------------------------------- arbitrary schedules


TURN = st.tuples(st.lists(st.integers(3, 40), max_size=6), st.integers(1, 9))
ROWS = st.lists(
    st.tuples(st.sampled_from([LONG, SHORT, [14]]), st.integers(1, 9), st.lists(TURN, max_size=2)),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=15, derandomize=True, database=None)
@given(
    rows=ROWS,
    choices=st.lists(st.integers(0, 12), max_size=40),
    tokens=st.sampled_from([60, 90, 100_000]),
    bounds=st.sampled_from([(None, 32), (None, 1), (2, 32), (1, 1)]),
)
def test_any_schedule_says_what_each_turn_says_alone(rows: Any, choices: list[int], tokens: int, bounds: Any):
    """Each choice submits the next turn of an idle row, sometimes without continuing it, or advances the session, or
    aborts a turn, which is asked for again."""
    model, (max_rows, headroom) = build_model("qwen3", max_position_embeddings=128), bounds
    rows = [
        Conversation([Turn(prompt, 10 * i, budget), *(Turn(ids, 10 * i + j, n) for j, (ids, n) in enumerate(later, 1))])
        for i, (prompt, budget, later) in enumerate(rows)
    ]
    engine = NativeEngine(model, kv_memory=tokens * BYTES, max_rows=max_rows)
    with pytest.MonkeyPatch.context() as patch, engine.session(OPTIONS) as session:
        patch.setattr(scheduler, "HEADROOM", headroom)
        under_way: dict[int, Conversation] = {}
        while not all(row.is_over for row in rows):
            idle = [row for row in rows if not row.is_over and row.ticket not in under_way]
            choice = choices.pop() if choices else 1
            if idle and choice % 2:
                row = idle[choice % len(idle)]
                request = row.request()
                if choice == 11 and row.ticket is not None:
                    session.release(row.ticket)
                    request = replace(request, continues=None)
                row.ticket = session.submit(request)
                under_way[row.ticket] = row
                continue
            if under_way and choice == 12:
                ticket = sorted(under_way)[len(choices) % len(under_way)]
                session.abort([ticket])
                under_way.pop(ticket).ticket = None
            for ticket, sample in session.advance():
                row = under_way.pop(ticket)
                row.sampled.append(SampledTurn(row.request(), sample))
        for row in rows:
            assert row.ticket is not None
            session.release(row.ticket)
        assert session._scheduler.cache.offloaded_tokens == 0
        assert not (session._scheduler.groups or session._scheduler._retained or session.num_open)
        assert sorted(session._sampler._free) == list(range(len(session._sampler.logprobs)))
    assert engine.statistics.peak_bytes <= tokens * BYTES
    assert_sampled_as_if_alone(model, rows, OPTIONS)
