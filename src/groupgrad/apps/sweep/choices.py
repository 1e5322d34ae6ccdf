"""The values that a sweep tries for a field: a list of them, or a range of numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RANGE_KEYS = ("range", "num", "step", "scale")


@dataclass(slots=True, frozen=True)
class Values:
    """Values that are tried as they are."""

    values: tuple[Any, ...]

    def grid(self) -> tuple[Any, ...]:
        """All values."""
        return self.values

    def draw(self, rng: random.Random) -> Any:
        """One of the values."""
        return rng.choice(self.values)


@dataclass(slots=True, frozen=True)
class Range:
    """Numbers between two bounds, both included; a random sample draws them evenly, or evenly in their logarithm."""

    low: float
    high: float
    is_log: bool
    is_whole: bool

    def grid(self) -> tuple[Any, ...]:
        """ValueError: a grid needs single values."""
        raise ValueError(
            f"the range from {self.low:g} to {self.high:g} has no single values to make a grid of; add num (how many) "
            "or step, or set sample to random or optuna"
        )

    def draw(self, rng: random.Random) -> Any:
        """A number from the range, rounded to four digits so that it can be read and written."""
        if self.is_whole and not self.is_log:
            return rng.randint(int(self.low), int(self.high))
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        drawn = rng.uniform(low, high)
        value = math.exp(drawn) if self.is_log else drawn
        return round(value) if self.is_whole else rounded(value)


Choices = Values | Range


def rounded(value: float) -> float:
    """A number with four significant digits."""
    return float(f"{value:.4g}")


def read_choices(field: str, given: Any) -> Choices:
    """Reads the entry of a field in `vary`. ValueError if it names no values."""
    if isinstance(given, Mapping) and "range" in given:
        return _read_range(field, given)
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise ValueError(
            f"vary: {field}={given!r} is one value, which nothing is compared with; give a list of values or "
            "{range: [low, high]}"
        )
    values = tuple(given)
    if len(values) < 1:
        raise ValueError(f"vary: {field} is an empty list; give the values to try")
    repeated = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if repeated is not None:
        raise ValueError(f"vary: {field} has the value {repeated!r} twice; name each value once")
    return Values(values)


def _read_range(field: str, given: Mapping[str, Any]) -> Choices:
    unknown = [key for key in given if key not in _RANGE_KEYS]
    if unknown:
        raise ValueError(f"vary: {field} has the unknown key {unknown[0]!r}; a range has {', '.join(_RANGE_KEYS)}")
    bounds, scale = given["range"], given.get("scale", "linear")
    ends = list(bounds) if isinstance(bounds, (list, tuple)) else []
    if len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends) or not ends[0] < ends[1]:
        raise ValueError(f"vary: {field} has range={bounds!r}; give two numbers, the lower one first")
    if scale not in ("linear", "log"):
        raise ValueError(f"vary: {field} has scale={scale!r}; set it to linear or log")
    low, high = ends
    if scale == "log" and low <= 0:
        raise ValueError(f"vary: {field} has scale=log and begins at {low:g}; a logarithm needs numbers above 0")
    num, step = given.get("num"), given.get("step")
    if num is not None and step is not None:
        raise ValueError(f"vary: {field} has num and step; set one of them")
    is_whole = all(isinstance(end, int) for end in ends)
    if step is not None:
        return Values(_stepped(field, low, high, step, scale))
    if num is not None:
        return Values(_evenly_spaced(field, low, high, num, scale == "log", is_whole))
    return Range(low, high, scale == "log", is_whole)


def _stepped(field: str, low: float, high: float, step: Any, scale: str) -> tuple[Any, ...]:
    if not isinstance(step, (int, float)) or step <= 0 or scale == "log":
        raise ValueError(f"vary: {field} has step={step!r} with scale={scale}; a step is above 0 on a linear scale")
    count = int((high - low) / step + 1e-9) + 1
    return tuple(low + index * step if isinstance(step, int) else rounded(low + index * step) for index in range(count))


def _evenly_spaced(field: str, low: float, high: float, num: Any, is_log: bool, is_whole: bool) -> tuple[Any, ...]:
    if not isinstance(num, int) or num < 2:
        raise ValueError(f"vary: {field} has num={num!r}; a range with both ends has at least 2 values")
    shares = [index / (num - 1) for index in range(num)]
    values = [low * (high / low) ** share if is_log else low + (high - low) * share for share in shares]
    return tuple(dict.fromkeys(round(value) if is_whole else rounded(value) for value in values))
