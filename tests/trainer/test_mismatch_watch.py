"""The watch on sampling against training."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from groupgrad.metrics import maximum, mean_of, merge_all
from groupgrad.models.rounding import Rounding
from groupgrad.objectives import FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS
from groupgrad.trainer.sampler_logprobs import MISMATCH, has_dropout
from groupgrad.trainer.step_log import MismatchWatch, tolerance


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


def test_half_precision_and_low_temperatures_may_round_more():
    float32, bfloat16, float16 = (Rounding(eps) for eps in (2**-23, 2**-7, 2**-10))
    assert [tolerance(rounding, 1.0) for rounding in (float32, bfloat16, float16)] == [1e-4, 0.5, 0.0625]
    assert tolerance(float32, 0.01) == pytest.approx(1e-2)
    assert tolerance(bfloat16, 0.5) == 1.0
    assert tolerance(float32, 5.0) == 1e-4


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
