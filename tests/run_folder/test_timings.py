from __future__ import annotations

import pytest

from groupgrad.run_folder.timings import Timings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_phases_count_exclusively():
    clock = Clock()
    timings = Timings(clock=clock)
    clock.now += 5  # outside any phase, not counted
    with timings.phase("sampling"):
        clock.now += 2
        with timings.phase("rewards"):
            clock.now += 3
        clock.now += 1
    with timings.phase("training"):
        clock.now += 0.5
    assert timings.take() == {"sampling": 3.0, "rewards": 3.0, "training": 0.5}
    assert timings.take() == {}


def test_a_phase_repeated_or_inside_itself_adds_up_once():
    clock = Clock()
    timings = Timings(clock=clock)
    for _ in range(3):
        with timings.phase("scoring"):
            clock.now += 1
            with timings.phase("scoring"):
                clock.now += 2
    assert timings.take() == {"scoring": 9.0}


def test_an_inclusive_phase_counts_the_time_of_phases_inside_it():
    clock = Clock()
    timings = Timings(clock=clock)
    with timings.phase("sampling"):
        clock.now += 1
    with timings.phase("training"):
        clock.now += 2
        with pytest.raises(KeyError), timings.inclusive("evaluating"):
            clock.now += 3
            with timings.phase("sampling"):
                clock.now += 4
                raise KeyError
        clock.now += 5
    with timings.inclusive("evaluating"):
        clock.now += 6
    assert timings.take() == {"sampling": 1.0, "training": 7.0, "evaluating": 13.0}


def test_take_inside_a_phase_splits_it():
    clock = Clock()
    timings = Timings(clock=clock)
    with timings.phase("training"):
        clock.now += 4
        assert timings.take() == {"training": 4.0}
        clock.now += 1
    assert timings.take() == {"training": 1.0}


def test_an_exception_closes_the_phase():
    clock = Clock()
    timings = Timings(clock=clock)
    with pytest.raises(KeyError), timings.phase("rewards"):
        clock.now += 2
        raise KeyError
    clock.now += 7
    assert timings.take() == {"rewards": 2.0}


def test_the_hook_is_called_at_each_beginning_and_return():
    phases: list[str] = []
    timings = Timings(phases.append)
    with timings.phase("sampling"), timings.phase("rewards"):
        pass
    with timings.phase("training"):
        pass
    assert phases == ["sampling", "rewards", "sampling", "training"]
