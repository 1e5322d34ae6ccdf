"""Metrics that are combined exactly over micro-batches, ranks and steps: sums over counts, never means of means.

A metric's value may be a 0-dim tensor, so that measuring does not wait for the accelerator. It becomes a float when it
is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Scalar = float | int | torch.Tensor


@dataclass(slots=True, frozen=True)
class Metric:
    """A measured value with its reduction.

    `mean` holds a total and the weight (count) that divides it; `sum`, `min` and `max` hold the value itself; `last`
    keeps the most recent value, which all ranks share. A mean of weight 0 and a NaN value mean "nothing measured".
    """

    kind: Literal["mean", "sum", "min", "max", "last"]
    value: Scalar
    weight: Scalar = 1.0

    def read(self) -> float | None:
        """Returns the number, or None if nothing was measured."""
        value, weight = float(self.value), float(self.weight)
        if self.kind == "mean":
            return None if weight == 0 else value / weight
        return None if value != value else value


def mean_of(total: Scalar, count: Scalar) -> Metric:
    """Metric whose value is `total / count`."""
    return Metric("mean", _detached(total), _detached(count))


def average(value: Scalar) -> Metric:
    """Metric that averages its values, each with weight 1."""
    return mean_of(value, 1.0)


def minimum(value: Scalar) -> Metric:
    """Metric that keeps the smallest value; NaN is "no value"."""
    return Metric("min", _detached(value))


def maximum(value: Scalar) -> Metric:
    """Metric that keeps the largest value; NaN is "no value"."""
    return Metric("max", _detached(value))


def total(value: Scalar) -> Metric:
    """Metric that adds its values."""
    return Metric("sum", _detached(value))


def latest(value: Scalar) -> Metric:
    """Metric that keeps the last value."""
    return Metric("last", _detached(value))


def merge(first: Metric, second: Metric) -> Metric:
    """Combines two measurements of one quantity. ValueError if their reductions differ."""
    if first.kind != second.kind:
        raise ValueError(f"cannot merge a '{first.kind}' metric with a '{second.kind}' metric; log it in one way only")
    if first.kind == "mean":
        return Metric("mean", first.value + second.value, first.weight + second.weight)
    if first.kind == "sum":
        return Metric("sum", first.value + second.value)
    if first.kind == "last":
        return second
    a, b = float(first.value), float(second.value)
    if a != a:
        return second
    if b != b:
        return first
    return first if (a <= b) == (first.kind == "min") else second


def merge_all(sets: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combines sets of metrics key by key; a key may be missing from some."""
    merged: dict[str, Metric] = {}
    for metrics in sets:
        for key, metric in metrics.items():
            merged[key] = merge(merged[key], metric) if key in merged else metric
    return merged


def _detached(value: Scalar) -> Scalar:
    return value.detach() if isinstance(value, torch.Tensor) else value
