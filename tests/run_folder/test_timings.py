"""Seconds of phases, on a clock that only the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad.activity import Timings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spend(timings: Timings, clock: Clock, *parts: Any) -> None:
    """Lets seconds pass. A tuple is a phase with its parts."""
    for part in parts:
        if isinstance(part, tuple):
            name, *inner = part
            with timings.phase(name):
                spend(timings, clock, *inner)
        else:
            clock.now += part


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        pytest.param(
            [5, ("sampling", 2, ("rewards", 3), 1), ("training", 0.5)],
            {"sampling": 3, "rewards": 3, "training": 0.5},
            id="an outer phase without the inner one, nothing outside of phases",
        ),
        pytest.param([("scoring", 1, ("scoring", 2))] * 3, {"scoring": 9}, id="repeated, and inside itself"),
    ],
)
def test_phases_add_up(parts: list[Any], seconds: dict[str, float]):
    clock = Clock()
    timings = Timings(clock=clock)
    spend(timings, clock, *parts)
    assert timings.take() == seconds
    assert timings.take() == {}


def test_take_inside_a_phase_splits_it():
    clock = Clock()
    timings = Timings(clock=clock)
    with timings.phase("training"):
        clock.now += 4
        assert timings.take() == {"training": 4.0}
        clock.now += 1
    assert timings.take() == {"training": 1.0}


def test_an_exception_closes_the_phases():
    clock = Clock()
    timings = Timings(clock=clock)
    with timings.phase("training"):
        with pytest.raises(KeyError), timings.phase("evaluating"), timings.phase("sampling"):
            clock.now += 4
            raise KeyError
        clock.now += 5
    clock.now += 7
    assert timings.take() == {"training": 5.0, "evaluating": 0.0, "sampling": 4.0}


def test_the_hook_is_called_at_each_beginning_and_return():
    phases: list[str] = []
    spend(Timings(phases.append), Clock(), ("sampling", ("rewards",)), ("training",))
    assert phases == ["sampling", "rewards", "sampling", "training"]
