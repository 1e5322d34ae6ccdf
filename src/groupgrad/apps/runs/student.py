"""Student's distribution (Student, Biometrika 6(1), 1908)."""

from __future__ import annotations

import math

import numpy as np


def student_tail(t: float, freedom: float) -> float:
    """P(T >= t) of Student's distribution.

    With T = sqrt(freedom) tan(a), the angle a has a density in proportion to cos(a)^(freedom - 1), which is integrated
    by Simpson's rule.
    """

    def area(low: float, high: float) -> float:
        angles = np.linspace(low, high, 4001)
        heights = np.cos(angles).clip(min=0.0) ** (freedom - 1)
        weights = np.ones_like(angles)
        weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
        return float((heights * weights).sum() * (angles[1] - angles[0]) / 3)

    tail = area(math.atan(abs(t) / math.sqrt(freedom)), math.pi / 2) / (2 * area(0.0, math.pi / 2))
    return tail if t >= 0 else 1 - tail


def student_quantile(tail: float, freedom: float) -> float:
    """The t, 0 or more, with P(T >= t) = `tail`, which is above 0 and at most 0.5."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > tail else (low, middle)
    return high
