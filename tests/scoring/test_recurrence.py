"""Hybrid models in the shared layout score, and have the gradients, of one plain forward pass for each row."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import assert_same_gradients, assert_scored_as_one_pass_a_row, batch_of, gradients
from tiny_hybrids import CONFIGS, make_hybrid
from token_spans import make_spans

from groupgrad.integrations.recurrent import recurrent_layers, recurrent_scans
from groupgrad.integrations.recurrent.recurrent_scans import gated_delta_rule
from groupgrad.kernels import library, status
from groupgrad.kernels.compile import SWITCH
from groupgrad.models.recurrent_classes import RECURRENT_FUNCTIONS
from groupgrad.scoring import recurrence as recurrence_module
from groupgrad.scoring.attention import unplug
from groupgrad.scoring.forward import ForwardOptions, score_tokens
from groupgrad.scoring.recurrence import Recurrence
from groupgrad.scoring.self_check import check_layout

OPTIONS = ForwardOptions(layout="shared")


def test_each_recurrent_function_has_a_counterpart() -> None:
    assert recurrent_layers._COUNTERPARTS.keys() == RECURRENT_FUNCTIONS


@pytest.mark.quick("lfm2", "nemotron_h", "qwen3_5")
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_and_gradients_are_those_of_one_pass_a_row(family: str, row_logits: Any) -> None:
    assert_scored_as_one_pass_a_row(make_hybrid(family), batch_of(1), row_logits)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_start_up_check_takes_the_shared_layout(family: str) -> None:
    """In mixed precision too."""
    model = make_hybrid(family)
    report = check_layout(model, ForwardOptions())
    assert (report.layout, report.tiled_head, report.reason) == ("shared", True, None)
    assert report.difference is not None and report.difference < 1e-4
    report = check_layout(model, ForwardOptions(), partial(torch.autocast, "cpu", torch.bfloat16))
    assert (report.layout, report.reason) == ("shared", None)


def test_a_pass_between_forward_and_backward_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_hybrid("qwen3_5").train(), batch_of(2)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = score_tokens(model, batch, OPTIONS).logprobs.sum()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("routed")

    with torch.no_grad(), monkeypatch.context() as patch:
        for name in recurrent_layers._COUNTERPARTS:
            patch.setitem(recurrent_layers._COUNTERPARTS, name, refuse)
        between = model(input_ids=ids).logits
    torch.testing.assert_close(between, expected, rtol=0, atol=1e-5)  # some processors round attention otherwise
    monkeypatch.setitem(recurrent_layers._COUNTERPARTS, "torch_chunk_gated_delta_rule", refuse)
    with pytest.raises(AssertionError, match="routed"):  # the backward pass is routed
        loss.backward()
    unplug(model)


def test_a_model_on_another_thread_is_its_own() -> None:
    policy, judge, batch = make_hybrid("qwen3_5"), make_hybrid("qwen3_5", seed=1), batch_of(2)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = judge(input_ids=ids).logits
    found: list[torch.Tensor] = []

    def ask() -> None:
        with torch.no_grad():
            found.append(judge(input_ids=ids).logits)

    def ask_aside(*_: Any) -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    policy.model.layers[1].register_forward_hook(ask_aside)
    with torch.no_grad():
        score_tokens(policy, batch, OPTIONS)
    assert found and all(torch.equal(logits, expected) for logits in found)


SEGMENTS = st.lists(
    st.tuples(st.integers(1, 70), st.lists(st.integers(0, 150), min_size=0, max_size=3)), min_size=1, max_size=3
)


@pytest.mark.parametrize("block", [64, 128, 2048])
@settings(max_examples=10, deadline=None)
@given(SEGMENTS, st.integers(0, 2**16), st.sampled_from([1, 16, 64]))
def test_states_pass_through_chunks_as_through_tokens(
    block: int, lengths: list[tuple[int, list[int]]], seed: int, size: int
) -> None:
    """h <- a h + x by chunks in blocks, against a float64 loop over the tokens of each row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence_module, "BLOCK_TOKENS", block)
        patch.setattr(recurrence_module, "CHUNK_SIZES", (size,))
        _check_states(lengths, seed)


def _check_states(lengths: list[tuple[int, list[int]]], seed: int) -> None:
    spans, rows = make_spans(lengths)
    total = sum(span.length for span in spans)
    generator = torch.Generator().manual_seed(seed)
    decay, value = torch.rand(2, total, generator=generator, dtype=torch.float64)
    recurrence = Recurrence(spans)
    chunks = recurrence.chunks(torch.device("cpu"))
    log_decays = chunks.split(decay.log())
    steps = chunks.steps(lambda *values: (values[0].cumsum(-1), values[1]), log_decays, chunks.split(value))

    def advance(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_decay, inputs = next(steps)
        kept = log_decay.exp()
        between = (log_decay[:, :, None] - log_decay[:, None, :]).exp().tril()
        output = kept * state[:, None] + (between @ inputs[..., None]).squeeze(-1)
        return output, output[:, -1]

    measured = chunks.join(recurrence.scan(chunks, lambda n: torch.zeros(n, dtype=torch.float64), advance))
    for places in rows:
        state = 0.0
        for place in places:
            state = float(decay[place]) * state + float(value[place])
            assert float(measured[place]) == pytest.approx(state, rel=1e-9)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_blocks_of_chunks_give_the_gradients_of_all_chunks_at_once(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")  # the kernels know no blocks
    model, batch, results = make_hybrid(family), batch_of(1), []
    weights = torch.linspace(-1, 2, batch.num_tokens)
    for block in (10**9, 64):
        monkeypatch.setattr(recurrence_module, "BLOCK_TOKENS", block)
        results.append(gradients(model, (weights * score_tokens(model, batch, OPTIONS).logprobs).sum()))
    assert_same_gradients(results[1], results[0], rtol=1e-5, atol=1e-6)


COMPILED_SCANS = ("qwen3_5", "olmo_hybrid", "nemotron_h")


@pytest.mark.parametrize("family", (*COMPILED_SCANS, "lfm2"))
def test_compiled_layers_give_the_log_probs_and_gradients_of_pytorch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library() is None:
        pytest.skip(status())
    model, batch, results = make_hybrid(family), batch_of(3), []
    weights = torch.linspace(-1, 2, batch.num_tokens)
    for is_compiled in (True, False):
        with monkeypatch.context() as patch:
            if not is_compiled:
                patch.setattr(recurrent_scans, "step_kernels", lambda *_: None)
            elif family in COMPILED_SCANS:
                patch.setattr(Recurrence, "scan", None)
            if is_compiled:
                patch.setattr(recurrent_scans, "_convolved", None)
            logprobs = score_tokens(model, batch, OPTIONS).logprobs
            results.append({"logprobs": logprobs.detach(), **gradients(model, (weights * logprobs).sum())})
    compiled, plain = results
    torch.testing.assert_close(compiled.pop("logprobs"), plain.pop("logprobs"), rtol=0, atol=1e-5)
    assert_same_gradients(compiled, plain, rtol=1e-5)


@settings(max_examples=6, deadline=None)
@given(SEGMENTS, st.integers(0, 2**16))
def test_the_gated_delta_rule_is_the_recurrence_of_its_paper(lengths: list[tuple[int, list[int]]], seed: int) -> None:
    spans, rows = make_spans(lengths)
    total, heads, width = sum(span.length for span in spans), 2, 3
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, total, heads, width, generator=generator, dtype=torch.float64)
    g = -torch.rand(1, total, heads, generator=generator, dtype=torch.float64)
    beta = torch.rand(1, total, heads, generator=generator, dtype=torch.float64)
    k = torch.nn.functional.normalize(k, dim=-1)
    measured, _ = gated_delta_rule(Recurrence(spans), q, k, v, g=g, beta=beta)
    for places in rows:
        state = torch.zeros(heads, width, width, dtype=torch.float64)
        for place in places:
            key, value, b = k[0, place, :, :, None], v[0, place, :, None, :], beta[0, place, :, None, None]
            state = g[0, place].exp()[:, None, None] * state
            state = state + b * key @ (value - key.mT @ state)
            expected = (q[0, place, :, None, :] @ state).squeeze(1) * width**-0.5
            torch.testing.assert_close(measured[0, place], expected, rtol=1e-8, atol=1e-10)
