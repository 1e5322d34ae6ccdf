"""Combination of metrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupgrad.metrics import Metric, average, latest, maximum, mean_of, merge, merge_all, minimum, total

NAN = float("nan")


def test_reading_each_kind():
    assert mean_of(6.0, 4).read() == 1.5
    assert average(2.5).read() == 2.5
    assert total(3.0).read() == 3.0
    assert minimum(-1.0).read() == -1.0
    assert maximum(7).read() == 7.0
    assert latest(4.0).read() == 4.0


@pytest.mark.parametrize("metric", [mean_of(0.0, 0), minimum(NAN), maximum(NAN), total(NAN), latest(NAN)])
def test_nothing_measured_reads_none(metric: Metric):
    assert metric.read() is None


def test_merged_numbers_by_hand():
    assert merge(mean_of(1.0, 1), mean_of(9.0, 3)).read() == 2.5, "a sum over counts, not the mean of 1 and 3"
    assert merge(total(2.0), total(5.0)).read() == 7.0
    assert merge(minimum(2.0), minimum(5.0)).read() == merge(minimum(5.0), minimum(2.0)).read() == 2.0
    assert merge(maximum(2.0), maximum(5.0)).read() == merge(maximum(5.0), maximum(2.0)).read() == 5.0
    assert merge(latest(2.0), latest(1.0)).read() == 1.0


@pytest.mark.parametrize("make", [minimum, maximum])
def test_an_extremum_of_nothing_gives_way(make):
    assert merge(make(NAN), make(3.0)).read() == 3.0
    assert merge(make(3.0), make(NAN)).read() == 3.0
    assert merge(make(NAN), make(NAN)).read() is None


def test_a_mean_of_nothing_adds_nothing():
    assert merge(mean_of(0.0, 0), mean_of(4.0, 2)).read() == 2.0


def test_kinds_do_not_mix():
    with pytest.raises(ValueError, match="cannot merge a 'mean' metric with a 'sum' metric"):
        merge(average(1.0), total(1.0))


def test_keys_may_be_missing_from_some_parts():
    merged = merge_all([{"a": average(1.0)}, {"b": total(1.0)}, {"a": average(3.0), "b": total(2.0)}, {}])
    assert {key: metric.read() for key, metric in merged.items()} == {"a": 2.0, "b": 3.0}
    assert merge_all([]) == {}


NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12)


@given(NUMBERS, st.integers(0, 12))
def test_any_split_of_the_values_gives_the_same_numbers(values: list[float], cut: int):
    for make, rule in ((average, lambda v: sum(v) / len(v)), (total, sum), (minimum, min), (maximum, max)):
        parts = [merge_all([{"x": make(v)} for v in part]) for part in (values[:cut], values[cut:])]
        merged = merge_all(parts)["x"].read()
        assert merged is not None
        assert math.isclose(merged, rule(values), rel_tol=1e-9, abs_tol=1e-9)


def test_tensors_carry_no_gradient_and_become_floats_when_read():
    value = torch.tensor(2.0, requires_grad=True)
    merged = merge(mean_of(value * 3, torch.tensor(2)), mean_of(torch.tensor(4.0), 2.0))
    assert isinstance(merged.value, torch.Tensor)
    assert not merged.value.requires_grad
    assert merged.read() == 2.5
    assert (float(merged.value), float(merged.weight)) == (10.0, 4.0)
    assert merge(minimum(torch.tensor(3.0)), minimum(torch.tensor(2.0))).read() == 2.0
