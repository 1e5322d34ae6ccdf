"""One measured quantity and how it is combined over micro-batches, ranks and steps: sums over counts, never means of
means.

A metric's value may be a 0-dim tensor, so that measuring on an accelerator does not wait for it; it becomes a float
when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Scalar = float | int | torch.Tensor


@dataclass(slots=True, frozen=True)
class Metric:
    """A value with its rule of combination.

    `mean` holds a total and the weight (count) it is to be divided by; `sum`, `min` and `max` hold the value itself;
    `last` keeps the most recent one (ranks are expected to agree). A mean of weight 0 and a NaN extremum are "nothing
    measured".
    """

    kind: Literal["mean", "sum", "min", "max", "last"]
    value: Scalar
    weight: Scalar = 1.0

    def read(self) -> float | None:
        """The number, or None if nothing was measured."""
        value, weight = float(self.value), float(self.weight)
        if self.kind == "mean":
            return None if weight == 0 else value / weight
        return None if value != value else value

    def detached(self) -> Metric:
        """The same metric as plain floats; waits for the device."""
        return Metric(self.kind, float(self.value), float(self.weight))


def mean_of(total: Scalar, count: Scalar) -> Metric:
    """A metric that reads `total / count`."""
    return Metric("mean", _free(total), _free(count))


def average(value: Scalar) -> Metric:
    """A metric that averages the values added, each with weight 1."""
    return mean_of(value, 1.0)


def minimum(value: Scalar) -> Metric:
    """A metric that reads the smallest value added; NaN is "no value"."""
    return Metric("min", _free(value))


def maximum(value: Scalar) -> Metric:
    """A metric that reads the largest value added; NaN is "no value"."""
    return Metric("max", _free(value))


def total(value: Scalar) -> Metric:
    """A metric that reads the sum of the values added."""
    return Metric("sum", _free(value))


def latest(value: Scalar) -> Metric:
    """A metric that reads the value added last."""
    return Metric("last", _free(value))


def merge(first: Metric, second: Metric) -> Metric:
    """Combine two measurements of one quantity; both must be of the same kind (ValueError otherwise)."""
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


def merge_all(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine several sets of metrics key by key; a key may be missing from some."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            merged[key] = merge(merged[key], metric) if key in merged else metric
    return merged


def _free(value: Scalar) -> Scalar:
    return value.detach() if isinstance(value, torch.Tensor) else value
