"""Long rows in recurrent layers are computed in stretches, with the result of the whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import assert_scored_as_one_pass_a_row, gradients
from tiny_hybrids import CONFIGS, VOCABULARY, make_hybrid
from token_spans import make_spans

from groupgrad.integrations.recurrent import recurrent_layers
from groupgrad.integrations.recurrent.recurrent_scans import gated_delta_rule
from groupgrad.integrations.recurrent.stretches import Carried, Stretch, cut
from groupgrad.kernels import library, status
from groupgrad.memory import oom_retry
from groupgrad.scoring.attention import unplug
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens
from groupgrad.scoring.recurrence import Recurrence


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stretches have at most 128 tokens, and so have passes; the list gets the number of each stretch's tokens."""
    computed: list[int] = []
    begin = Stretch.begin_layer

    def counted(self: Stretch, carried: Carried) -> None:
        computed.append(self.num_tokens)
        begin(self, carried)

    monkeypatch.setattr(Stretch, "begin_layer", counted)
    monkeypatch.setattr(oom_retry, "tokens_per_pass", lambda width: 128)
    monkeypatch.setattr(recurrent_layers, "STRETCH_TOKENS", 128)
    return computed


def long_batch() -> Any:
    """Two long rows behind a prompt that is cut, two behind one that is not, one of which is short."""
    rng = random.Random(0)
    lengths = ((130, (150, 70)), (5, (300, 3)))
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length, _ in lengths]
    rows = [(prompt, length) for prompt, (_, own) in enumerate(lengths) for length in own]
    completions = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for _, length in rows]
    return build_batch(prompts, [prompt for prompt, _ in rows], completions)


@pytest.mark.quick("lfm2", "nemotron_h", "qwen3_5")
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_and_gradients_are_those_of_one_pass_a_row(
    family: str, row_logits: Any, short_stretches: list[int]
) -> None:
    assert_scored_as_one_pass_a_row(make_hybrid(family), long_batch(), row_logits)
    assert len(short_stretches) >= 6 and max(short_stretches) <= 128


def test_layers_that_are_computed_again_take_the_same_stretches(short_stretches: list[int]) -> None:
    batch, results = long_batch(), []
    weights = torch.linspace(-1, 2, batch.num_tokens)
    for checkpointing in (False, True):
        model = make_hybrid("qwen3_5").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logprobs = score_tokens(model, batch, ForwardOptions(layout="shared")).logprobs
        before = len(short_stretches)
        results.append(gradients(model, (weights * logprobs).sum()))
        assert (len(short_stretches) > before) == checkpointing
        unplug(model)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_passes_of_ordinary_length_and_models_under_zero_3_stay_whole(
    monkeypatch: pytest.MonkeyPatch, short_stretches: list[int]
) -> None:
    model, batch = make_hybrid("qwen3_5"), long_batch()
    monkeypatch.setattr(oom_retry, "tokens_per_pass", lambda width: 1000)
    score_tokens(model, batch, ForwardOptions(layout="shared"))
    assert not short_stretches
    monkeypatch.setattr(oom_retry, "tokens_per_pass", lambda width: 128)
    monkeypatch.setattr("groupgrad.integrations.recurrent.recurrent_layers.is_zero_sharded", lambda model: True)
    score_tokens(model, batch, ForwardOptions(layout="shared"))
    assert not short_stretches


SEGMENTS = st.lists(st.tuples(st.integers(1, 150), st.lists(st.integers(0, 150), max_size=3)), min_size=1, max_size=2)


@settings(max_examples=8, deadline=None)
@given(SEGMENTS, st.integers(64, 200), st.integers(0, 2**16))
def test_the_compiled_delta_rule_goes_on_from_stretch_to_stretch(
    lengths: list[tuple[int, list[int]]], most: int, seed: int
) -> None:
    """The outputs of whole rows to the bit, and the gradients of a float64 loop over the tokens of each row."""
    if library() is None:
        pytest.skip(status())
    spans = [span for span in make_spans(lengths)[0] if span.length]
    total, generator = sum(span.length for span in spans), torch.Generator().manual_seed(seed)
    inputs = [
        *torch.randn(3, 1, total, 2, 6, generator=generator),
        -0.1 * torch.rand(1, total, 2, generator=generator),
        torch.rand(1, total, 2, generator=generator),
    ]
    slopes = torch.randn(1, total, 2, 6, generator=generator)
    leaves = [x.clone().requires_grad_() for x in inputs]
    parts = cut(spans, most)
    sizes = [part.num_tokens for part in parts]
    carried: Carried = []
    outputs: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recurrence, "scan", None)  # as PyTorch computes it
        for part, *values in zip(parts, *(x.split(sizes, dim=1) for x in leaves)):
            part.begin_layer(carried)
            outputs.append(gated_delta_rule(part, *values, use_qk_l2norm_in_kernel=True)[0])
        whole, _ = gated_delta_rule(Recurrence(spans), *inputs, use_qk_l2norm_in_kernel=True)
    output = torch.cat(outputs, dim=1)
    assert torch.equal(output, whole)
    found = torch.autograd.grad((slopes * output).sum(), leaves)
    wide = [x.double().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad((slopes * _by_tokens(spans, *wide)).sum(), wide)
    for name, gradient, want in zip(("query", "key", "value", "decay", "strength"), found, wanted):
        atol = 2e-6 * float(want.abs().max())
        torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def _by_tokens(
    spans: list[TokenSpan], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """(1, T, H, D) outputs of the gated delta rule, one token after the other."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    ends: dict[int, torch.Tensor] = {}
    outputs = []
    for span in spans:
        state = v.new_zeros(2, 6, 6) if span.shared is None else ends[span.shared.start]
        for place in range(span.start, span.start + span.length):
            key = k[0, place, :, :, None]
            state = g[0, place].exp()[:, None, None] * state
            state = state + beta[0, place, :, None, None] * key @ (v[0, place, :, None] - key.mT @ state)
            outputs.append((q[0, place, :, None] @ state).squeeze(1) * 6**-0.5)
        ends[span.start] = state
    return torch.stack(outputs)[None]
