"""Sampler/trainer mismatch: levels, bounds, tokens without a sampler log-prob, metrics."""

from __future__ import annotations

import math

import pytest
import torch
from loss_batches import make_batch

from groupgrad.objectives import MismatchOptions, mismatch_metrics
from groupgrad.objectives.mismatch import mismatch_ratio

OLD = [[-1.3, -2.0, -0.4], [-0.9, -1.0]]


def test_bounds_include_their_ends():
    batch = make_batch([[True] * 3, [True] * 2], [1.0, 1.0], old=OLD, sampling=OLD)
    options = MismatchOptions("token_mask", clip_min=1.0, clip_max=1.0)
    assert mismatch_ratio(batch.old_logprobs, batch.sampling_logprobs, batch, options).values.tolist() == [1] * 5


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_tokens_that_were_not_reported_or_are_not_trained_weigh_one(mode):
    holes, trained = [[math.nan, -9.0, -0.4], [-math.inf, -1.0]], [[True, False, True], [True, True]]
    batch = make_batch(trained, [1.0, 1.0], old=OLD, sampling=holes)
    ratio = mismatch_ratio(batch.old_logprobs, batch.sampling_logprobs, batch, MismatchOptions(mode))
    assert set(ratio.values.tolist()) == {1}


@pytest.mark.parametrize("bounds", [(4.0, 3.0), (-1.0, 3.0), (None, 0.0), (None, -1.0), (math.nan, 1.0)])
def test_bounds_that_leave_nothing_are_refused(bounds):
    with pytest.raises(ValueError, match="leave no importance ratio; set 0 <= clip_min <= clip_max"):
        MismatchOptions("token_mask", *bounds)


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mismatch mode='truncate' is not known; set one of 'token_truncate'"):
        MismatchOptions("truncate")


def read(metrics):
    return {key.removeprefix("sampling/"): metric.read() for key, metric in metrics.items()}


def test_metrics():
    sampling = [[-1.0, -2.3, -9.0], [math.nan, -1.0]]
    batch = make_batch([[True, True, False], [True, True]], [1.0, 1.0], old=OLD, sampling=sampling)
    token = read(mismatch_metrics(batch, MismatchOptions("token_truncate", clip_max=1.2), batch.old_logprobs))
    assert token == {
        "sampling_logp_difference/mean": pytest.approx(0.6 / 3),
        "sampling_logp_difference/max": pytest.approx(0.3),
        "importance_sampling_ratio/min": pytest.approx(math.exp(-0.3)),
        "importance_sampling_ratio/mean": pytest.approx((math.exp(-0.3) + 1.2 + 1 + 1) / 4),
        "importance_sampling_ratio/max": pytest.approx(1.2),
        "frac_dropped_rows": 0.0,
        "frac_dropped_tokens": 0.0,
    }
    sequence = read(mismatch_metrics(batch, MismatchOptions("sequence_mask"), batch.old_logprobs))
    assert [sequence[f"importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")] == pytest.approx([1] * 3)


def test_metrics_of_masks_are_of_the_ratio_before_the_mask_and_say_what_is_dropped():
    # Token gaps of the first row +1 and 0, of the second +1 and +1, the third has no loss token.
    old, sampling = [[-1.0, -1.0], [-1.0, -1.0], [-1.0]], [[-2.0, -1.0], [-2.0, -2.0], [-9.0]]
    batch = make_batch([[True, True], [True, True], [False]], [1.0, 1.0, 1.0], old=old, sampling=sampling)
    token = read(mismatch_metrics(batch, MismatchOptions("token_mask", clip_max=2.0), batch.old_logprobs))
    assert token["importance_sampling_ratio/max"] == pytest.approx(math.e)
    assert token["importance_sampling_ratio/mean"] == pytest.approx((3 * math.e + 1) / 4)
    assert token["frac_dropped_tokens"] == pytest.approx(3 / 4)
    assert token["frac_dropped_rows"] == pytest.approx(1 / 2)
    sequence = read(mismatch_metrics(batch, MismatchOptions("sequence_mask", clip_max=3.0), batch.old_logprobs))
    assert sequence["importance_sampling_ratio/max"] == pytest.approx(math.exp(2))
    assert sequence["frac_dropped_tokens"] == pytest.approx(1 / 2)
    assert sequence["frac_dropped_rows"] == pytest.approx(1 / 2)


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
@pytest.mark.parametrize("trained", [[], [[]], [[False]]])
def test_metrics_of_nothing_measure_nothing(mode, trained):
    values = [[-1.0] * len(row) for row in trained]
    batch = make_batch(trained, [0.0] * len(trained), sampling=values)
    metrics = mismatch_metrics(batch, MismatchOptions(mode), torch.zeros(batch.num_tokens))
    assert len(metrics) == 7 and all(metric.read() is None for metric in metrics.values())
    batch.sampling_logprobs = None
    assert mismatch_metrics(batch, MismatchOptions(mode), torch.zeros(batch.num_tokens)) == {}
