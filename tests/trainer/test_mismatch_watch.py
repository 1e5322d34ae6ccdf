"""The watch on sampling against training."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from groupgrad.metrics import maximum, mean_of, merge_all
from groupgrad.objectives import FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS
from groupgrad.trainer.mismatch_watch import MISMATCH, MismatchWatch, computing_types, has_dropout, tolerance


def test_it_warns_once_and_again_after_tenfold_growth(caplog):
    watch, warned = MismatchWatch(1e-4), []
    for step, gaps in enumerate(
        [[1e-5, 1e-4], [2e-4, 1e-3, float("nan")], [9e-3], [1.1e-2], [0.1], [], [float("nan")]]
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            watch.end_step(step, merge_all({MISMATCH: maximum(torch.tensor(gap))} for gap in gaps))
        if caplog.records:
            warned.append(step)
            assert f"step {step}: " in caplog.text
    assert warned == [1, 3]


def test_half_precision_may_round_more():
    assert tolerance({torch.float32}, "cpu") == 1e-4
    assert tolerance({torch.float32, torch.bfloat16}, "cpu") == 0.5
    assert tolerance({torch.float16}, "cpu") == 0.0625
    assert tolerance(set(), "cpu") == 1e-4


def test_tf32_rounds_like_float16_on_a_gpu_alone(tf32):
    assert tolerance({torch.float32}, "cpu") == 1e-4
    assert tolerance({torch.float32}, "cuda") == 0.0625


@pytest.mark.parametrize(("mixed", "types"), [("no", {torch.float32}), ("bf16", {torch.float32, torch.bfloat16})])
def test_mixed_precision_counts_among_the_types(mixed, types):
    model = nn.Linear(2, 2)
    model.register_parameter("codes", nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False))
    assert computing_types(model, mixed) == types


def test_dropout_is_found_wherever_it_is(make_model):
    assert not has_dropout(make_model())
    assert has_dropout(make_model(attention_dropout=0.1))
    assert has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert not has_dropout(nn.Sequential(nn.Dropout(0.0)))


def test_more_than_a_quarter_dropped_is_said_once_and_again_above_half(caplog):
    watch, warned = MismatchWatch(1e-4), []
    for step, (tokens, rows) in enumerate([(25, 25), (26, 0), (40, 50), (0, 51), (100, 100)]):
        caplog.clear()
        micro_batches = [
            {
                FRAC_DROPPED_TOKENS: mean_of(tokens * share / 100, 1),
                FRAC_DROPPED_ROWS: mean_of(rows * share / 100, 1),
            }
            for share in (0, 2)  # their mean counts
        ]
        watch.end_step(step, merge_all(micro_batches))
        if caplog.records:
            warned.append(step)
            assert f"step {step}: " in caplog.text
            assert f"drops {rows} % of the completions and {tokens} % of the tokens" in caplog.text
            assert "Raise vllm_importance_sampling_clip_max" in caplog.text
    assert warned == [1, 3]
    watch.end_step(9, {})
