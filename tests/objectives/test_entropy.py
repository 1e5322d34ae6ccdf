"""The entropy threshold as an exact quantile, and the adaptive coefficient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupgrad.objectives import applied_entropy_coef, entropy_threshold, next_entropy_coef


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 50), keep=st.floats(0, 1))
def test_threshold_is_the_quantile(seed, count, keep):
    values = np.random.default_rng(seed).random(count)
    assert entropy_threshold(torch.from_numpy(values), keep) == pytest.approx(np.quantile(values, 1 - keep), abs=1e-7)


@pytest.mark.parametrize("keep", [k / 10 for k in range(11)])
def test_threshold_keeps_exactly_the_share(keep):
    values = torch.arange(11, dtype=torch.float64)[torch.randperm(11)] * 0.3
    kept = values >= entropy_threshold(values, keep)
    assert kept.sum() == round(keep * 10) + 1, "the token at the threshold is kept, also where 1 - keep is not exact"


def test_threshold_extremes():
    values = torch.tensor([2.0, 1.0, 3.0])
    assert entropy_threshold(values, 1.0) == 1 and entropy_threshold(values, 0.0) == 3
    assert entropy_threshold(torch.zeros(0), 0.2) == math.inf
    assert entropy_threshold(torch.tensor([0.5], dtype=torch.bfloat16), 0.2) == 0.5
    for keep in (-0.1, 3.0, math.nan):
        with pytest.raises(ValueError, match="set top_entropy_quantile from 0 to 1"):
            entropy_threshold(values, keep)


def test_threshold_of_more_values_than_torch_quantile_takes():
    values = torch.zeros(2**24 + 9, dtype=torch.uint8)
    values[: 2**23] = 1
    assert entropy_threshold(values, 0.25) == 1 and entropy_threshold(values, 0.75) == 0


def test_coefficient_moves_towards_the_target_within_its_bounds():
    rule = {"target": 0.2, "delta": 0.005, "minimum": 0.0, "maximum": 0.012}
    assert next_entropy_coef(0.0, 0.2, **rule) == 0.005
    assert next_entropy_coef(0.01, 0.1, **rule) == 0.012
    assert next_entropy_coef(0.01, 0.3, **rule) == 0.005
    assert next_entropy_coef(0.004, 0.3, **rule) == 0
    assert next_entropy_coef(0.004, math.nan, **rule) == 0.004


def test_coefficient_applies_only_below_the_target():
    assert applied_entropy_coef(0.1, None, target=0.2) == 0
    assert applied_entropy_coef(0.1, 0.3, target=0.2) == 0
    assert applied_entropy_coef(0.1, 0.2, target=0.2) == 0.1
