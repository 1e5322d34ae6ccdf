"""Beginnings that prompts share are computed once, with the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ragged_rows import assert_same_gradients, gradients
from tiny_hybrids import make_hybrid

from groupgrad.batch import LEAST_SHARED, Batch
from groupgrad.dist import RankGroup
from groupgrad.kernels import library
from groupgrad.kernels.compile import SWITCH
from groupgrad.scoring import forward
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.beginnings import _Runs, with_beginnings_once
from groupgrad.scoring.forward import ForwardOptions, build_batch, forward_inputs, score_tokens
from groupgrad.scoring.gradient_checkpointing import COPY_FRACTION, _saved_bytes
from groupgrad.scoring.layout import flat_layout
from groupgrad.types import Media

TREE = [[5, 6, 7, 8], [5, 6, 9, 10, 11], [5, 6, 9, 10, 12], [13], [5, 6, 9]]
"""Three prompts that part after two and four tokens, one apart, and one that begins the second."""


def tree_batch(prompts: list[list[int]] = TREE) -> Batch:
    completions = [[20, 21, 22], [23, 24], [25, 26, 27], [28], [29, 30], [], [31, 32]]
    return build_batch(prompts, [1, 0, 2, 3, 4, 0, 1], completions)


@pytest.mark.usefixtures("short_beginnings")
def test_what_each_token_sees():
    """The third prompt, the second and the first begin alike; values of one-hot tokens tell who is attended to."""
    apart = flat_layout(tree_batch(), shared_prefixes=True)
    once = with_beginnings_once(apart)
    assert len(apart.ids) - len(once.ids) == 2 + 4
    ids = once.ids.tolist()
    paths = {
        11: [5, 6, 9, 10, 11],
        12: [5, 6, 9, 10, 12],
        8: [5, 6, 7, 8],
        13: [13],
        20: [5, 6, 9, 10, 11, 20],
        21: [5, 6, 9, 10, 11, 20, 21],
        23: [5, 6, 7, 8, 23],
        25: [5, 6, 9, 10, 12, 25],
        29: [5, 6, 9, 29],
        31: [5, 6, 9, 10, 11, 31],
    }
    paths |= {path[end - 1]: path[:end] for path in paths.values() for end in range(1, len(path))}
    assert sorted(ids) == sorted([*paths, 26])
    assert [ids[place] for place in once.predictors] == [11, 20, 21, 8, 23, 12, 25, 26, 13, 9, 29, 11, 31]
    size = len(ids)
    call = AttentionCall(layer=0, scale=1.0)
    assert once.attention is not None and once.positions is not None
    seen = once.attention.attend(torch.zeros(1, size, 24), torch.zeros(1, size, 24), torch.eye(size, 24)[None], call)
    for place, token in enumerate(ids):
        path = paths.get(token, [*paths[25], 26])
        assert once.positions[place] == len(path) - 1
        expected = [1 / len(path) if other in path else 0.0 for other in ids]
        torch.testing.assert_close(seen[place, 0, :size], torch.tensor(expected))


@pytest.mark.usefixtures("short_beginnings")
@pytest.mark.parametrize("switch", ["1", "0"], ids=["kernels", "blocks"])
def test_every_architecture_scores_as_row_by_row(switch: str, any_model: Any, row_logits: Any, monkeypatch: Any):
    monkeypatch.setenv(SWITCH, switch)
    batch = tree_batch()
    logits = row_logits(any_model, batch).double().log_softmax(-1)
    expected = logits.gather(-1, batch.completion_ids[:, None])[:, 0].float()
    scores = score_tokens(any_model, batch, ForwardOptions())
    torch.testing.assert_close(scores.logprobs, expected, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 2, batch.num_tokens)
    assert_same_gradients(*(gradients(any_model, (weights * values).sum()) for values in (scores.logprobs, expected)))


@pytest.mark.skipif(library() is None, reason="without kernels numbers depend on the tokens beside them")
def test_a_long_beginning_changes_no_bit(build: Any, monkeypatch: Any) -> None:
    """It ends inside a tile of attention."""
    model, system = build("qwen3", max_position_embeddings=2048), [3 + i * i % 40 for i in range(517)]
    batch = tree_batch([system + prompt for prompt in TREE])
    assert forward_inputs(model, batch, ForwardOptions()).num_copied == 517 * 3 + 2 + 4
    once = score_tokens(model, batch, ForwardOptions()).logprobs
    monkeypatch.setattr(forward, "with_beginnings_once", lambda inputs: inputs)
    assert torch.equal(score_tokens(model, batch, ForwardOptions()).logprobs, once)


@pytest.mark.parametrize(("common", "num_copied"), [(LEAST_SHARED, LEAST_SHARED), (LEAST_SHARED - 1, 0)])
def test_few_tokens_are_not_worth_it(common: int, num_copied: int, build: Any) -> None:
    batch = build_batch([[5] * common + [6, 7], [5] * common + [8]], [0, 1], [[9, 9], [9, 9]])
    inputs = forward_inputs(build("qwen3"), batch, ForwardOptions())
    assert inputs.num_copied == num_copied
    assert len(inputs.ids) == 2 * common + 5 - num_copied


@pytest.mark.usefixtures("short_beginnings")
def test_who_computes_them_apart(build: Any) -> None:
    """States of recurrent layers are kept at the ends of prompts; load balancing counts all; images go as a whole."""
    batch = tree_batch()
    images = replace(batch, row_media=(Media((), {}, {}, "images"), *[None] * 6))
    layouts = [
        forward_inputs(make_hybrid("qwen3_next"), batch, ForwardOptions()),
        forward_inputs(build("qwen3"), batch, ForwardOptions(layout="packed")),
        forward_inputs(build("qwen3"), images, ForwardOptions()),
        forward_inputs(build("qwen3-moe"), batch, ForwardOptions(aux_loss=True, weighs_balance=True)),
        forward_inputs(build("qwen3"), batch, ForwardOptions(rank_group=RankGroup((0, 1), None))),
    ]
    assert [inputs.num_copied for inputs in layouts] == [0] * 5
    assert forward_inputs(build("qwen3"), batch, ForwardOptions()).num_copied == 6


def test_gradients_in_half_precision_are_added_in_float32():
    """256 copies of a gradient of 1 behind one of 256 would leave 256 in bfloat16, which has no 257."""
    values = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    copies = _Runs.apply(values, [(0, 1)] * 257)
    (gradient,) = torch.autograd.grad(copies, values, torch.tensor([256.0] + [1.0] * 256, dtype=torch.bfloat16))
    assert gradient.item() == 512.0 and gradient.dtype == torch.bfloat16


@pytest.mark.parametrize("switch", ["1", "0"], ids=["kernels", "blocks"])
def test_copies_keep_less_memory_than_is_counted(switch: str, build: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(SWITCH, switch)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "max_position_embeddings": 1024}
    model, options = build("qwen3", **sizes).train(), ForwardOptions()
    batch = tree_batch([[*range(3, 45)] * 12 + prompt for prompt in TREE])
    num_copied, once = forward_inputs(model, batch, options).num_copied, _saved_bytes(model, batch, options)
    monkeypatch.setattr(forward, "with_beginnings_once", lambda inputs: inputs)
    apart = _saved_bytes(model, batch, options)
    per_token = apart / len(forward_inputs(model, batch, options).ids)
    assert 0.1 < 1 - (apart - once) / num_copied / per_token < COPY_FRACTION
