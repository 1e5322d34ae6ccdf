"""Models with recurrent layers in the native engine: a prompt's states are computed once and given to its rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny_hybrids import CONFIGS, make_hybrid
from transformers import GenerationConfig

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.native.engine import NativeEngine
from groupgrad.engines.native.recurrent_states import SlotRecurrence
from groupgrad.kernels import library, status
from groupgrad.kernels.compile import SWITCH
from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens
from groupgrad.scoring.recurrence import Recurrence

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
OPTIONS = SamplingOptions(max_new_tokens=12)
FEW = ["qwen3_5", "nemotron_h", "lfm2"]


def dense_logprobs(model: Any, contexts: list[list[int]], completions: list[list[int]]) -> torch.Tensor:
    batch = build_batch(contexts, list(range(len(contexts))), completions)
    return score_tokens(model, batch, ForwardOptions(layout="dense")).logprobs.detach()


def sampled_logprobs(samples: list[Sample]) -> torch.Tensor:
    return torch.tensor([value for sample in samples for value in sample.logprobs or ()])


def requests(num_rows: int = 4, max_new_tokens: int = 12) -> list[Request]:
    return [
        Request(prompt, 10 * group + row, max_new_tokens)
        for group, prompt in enumerate(PROMPTS)
        for row in range(num_rows)
    ]


@pytest.mark.quick("lfm2", "nemotron_h", "qwen3_5")
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_are_those_of_the_dense_pass(family: str) -> None:
    model, asked = make_hybrid(family), requests(3)
    samples = NativeEngine(model).sample(asked, OPTIONS)
    expected = dense_logprobs(model, [r.prompt_ids for r in asked], [s.ids for s in samples])
    assert len({tuple(sample.ids) for sample in samples}) > 6
    torch.testing.assert_close(sampled_logprobs(samples), expected, rtol=0, atol=1e-5)


@pytest.mark.quick("lfm2", "nemotron_h", "qwen3_5")
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_text_is_that_of_generate(family: str) -> None:
    model = make_hybrid(family)
    samples = NativeEngine(model).sample(requests(1), SamplingOptions(max_new_tokens=12, top_k=1, eos_ids=(1,)))
    for prompt, sample in zip(PROMPTS, samples):
        settings = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
        generated = model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :]
        assert sample.ids == generated.tolist()


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "lfm2"])
def test_decode_steps_by_kernels_sample_as_those_of_torch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps without kernels run by chunks of one token; with them, no layer may go that way."""
    model, asked = make_hybrid(family), requests()
    monkeypatch.setenv(SWITCH, "0")
    plain = NativeEngine(model).sample(asked, OPTIONS)
    monkeypatch.delenv(SWITCH)
    scanned: list[bool] = []
    for name in ("initial_states", "inputs_before"):
        original = getattr(SlotRecurrence, name)
        watched = partial(_noting, original, scanned)
        monkeypatch.setattr(SlotRecurrence, name, lambda self, *args, f=watched: f(self, *args))
    fast = NativeEngine(model).sample(asked, OPTIONS)
    assert [sample.ids for sample in fast] == [sample.ids for sample in plain]
    torch.testing.assert_close(sampled_logprobs(fast), sampled_logprobs(plain), rtol=0, atol=1e-5)
    assert scanned and not any(scanned)


def _noting(function: Any, notes: list[bool], recurrence: Any, *args: Any) -> Any:
    notes.append(recurrence._is_in_place)
    return function(recurrence, *args)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_prompts_and_replies_by_kernels_sample_as_those_of_torch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy turns and replies behind a prompt of more than two chunks; log-probs are those of training."""
    if library() is None:
        pytest.skip(status())
    model, results = make_hybrid(family), []
    prompts = [[3 + (7 * number + place) % 40 for place in range(150 - 90 * number)] for number in range(2)]
    reply = [4 + place % 40 for place in range(70)]
    for switch in ("0", "1"):
        monkeypatch.setenv(SWITCH, switch)
        if switch == "1":
            monkeypatch.setattr(Recurrence, "scan", None)
        turns: list[tuple[list[int], list[int], list[float]]] = []
        with NativeEngine(model).session(SamplingOptions(max_new_tokens=9, top_k=1)) as session:
            tickets = [session.submit(Request(prompt, 1, 6, keep=True)) for prompt in prompts]
            finished = _finish_all(session, tickets)
            for prompt, ticket in zip(prompts, tickets):
                first = finished[ticket]
                turns.append((prompt, first.ids, list(first.logprobs or ())))
                context = [*prompt, *first.ids, *reply]
                second = _finish(session, session.submit(Request(context, 2, 8, continues=ticket)))
                turns.append((context, second.ids, list(second.logprobs or ())))
        results.append([ids for _, ids, _ in turns])
    assert results[0] == results[1]
    contexts, ids, logprobs = zip(*turns)  # of the kernels
    batch = build_batch(list(contexts), list(range(len(contexts))), list(ids))
    expected = score_tokens(model, batch, ForwardOptions(layout="shared")).logprobs.detach()
    found = torch.tensor([value for values in logprobs for value in values])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FEW)
def test_rows_that_wait_and_are_preempted_sample_the_same(family: str) -> None:
    model, asked = make_hybrid(family), requests(6, 40)
    free = NativeEngine(model).sample(asked, OPTIONS)
    session_bytes = _bytes_of(model, num_rows=5)
    tight = NativeEngine(model, kv_memory=session_bytes)
    bounded = tight.sample(asked, OPTIONS)
    assert tight.statistics.num_waited
    assert tight.statistics.peak_bytes <= session_bytes
    assert [sample.ids for sample in bounded] == [sample.ids for sample in free]
    torch.testing.assert_close(sampled_logprobs(bounded), sampled_logprobs(free), rtol=0, atol=1e-5)


def test_a_preempted_row_begins_anew_from_its_prompt() -> None:
    model, asked = make_hybrid("qwen3_5"), requests(3, 120)
    free = NativeEngine(model).sample(asked, OPTIONS)
    tight = NativeEngine(model, kv_memory=_bytes_of(model, num_rows=9, length=70))
    bounded = tight.sample(asked, OPTIONS)
    assert tight.statistics.num_preempted
    assert [sample.ids for sample in bounded] == [sample.ids for sample in free]


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("num_others", [0, 5])
def test_a_continued_row_goes_on_from_its_states(family: str, num_others: int) -> None:
    """A turn, a reply of three tokens, and another turn, beside rows that end in between."""
    model, engine = make_hybrid(family), NativeEngine(make_hybrid(family))
    with engine.session(OPTIONS) as session:
        ticket = session.submit(Request(PROMPTS[0], 1, 6, keep=True))
        for row in range(num_others):
            session.submit(Request(PROMPTS[row % 3], 50 + row, 3 + 5 * row))
        first = _finish(session, ticket)
        context = [*PROMPTS[0], *first.ids, 20, 21, 22]
        second = _finish(session, session.submit(Request(context, 2, 8, continues=ticket)))
    assert engine.statistics.num_restored == len(first.ids) - 1
    expected = dense_logprobs(model, [context], [second.ids])
    torch.testing.assert_close(sampled_logprobs([second]), expected, rtol=0, atol=1e-5)


def test_a_prompt_whose_logits_are_gone_is_computed_whole() -> None:
    model = make_hybrid("qwen3_5")
    engine = NativeEngine(model)
    with engine.session(OPTIONS) as session:
        session.submit(Request(PROMPTS[0], 1, 30))
        session.advance()
        late = _finish(session, session.submit(Request(PROMPTS[0], 2, 5)))
    expected = dense_logprobs(model, [PROMPTS[0]], [late.ids])
    torch.testing.assert_close(sampled_logprobs([late]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FEW)
def test_turns_go_on_under_a_bound_that_barely_holds_a_row(family: str) -> None:
    """A finished row that is kept beside what runs must not ask for room that the bound forbids."""
    model = make_hybrid(family)
    least = _bytes_of(model, num_rows=1, length=8) // 2
    room = _bytes_of(model, num_rows=1, length=1)
    for number in range(6):
        bound = least + number * room // 6
        engine = NativeEngine(model, kv_memory=bound)
        with engine.session(OPTIONS) as session:
            try:
                ticket = session.submit(Request(PROMPTS[0], 1, 6, keep=True))
            except ValueError as error:
                assert "engine_kv_memory" in str(error)
                continue
            first = _finish(session, ticket)
            context = [*PROMPTS[0], *first.ids]
            try:
                ticket = session.submit(Request(context, 2, 1, continues=ticket))
            except ValueError as error:
                assert "engine_kv_memory" in str(error)
                continue
            second = _finish(session, ticket)
        expected = dense_logprobs(model, [context], [second.ids])
        torch.testing.assert_close(sampled_logprobs([second]), expected, rtol=0, atol=1e-5)


def _finish(session: Any, ticket: int) -> Sample:
    while True:
        finished = dict(session.advance())
        if ticket in finished:
            return finished[ticket]


def _finish_all(session: Any, tickets: list[int]) -> dict[int, Sample]:
    finished: dict[int, Sample] = {}
    while not finished.keys() >= set(tickets):
        finished.update(session.advance())
    return finished


def _bytes_of(model: Any, num_rows: int, length: int = 52) -> int:
    """Bytes of the keys, values and states of rows of this length, beside three prompts."""
    probe = NativeEngine(model)
    with probe.session(OPTIONS) as session:
        cache = session._cache
    tokens = num_rows * (length + cache.state_tokens) + 3 * (len(PROMPTS[0]) + cache.state_tokens)
    return tokens * cache.bytes_per_token
