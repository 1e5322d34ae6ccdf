"""Replays of random rows, and bisections of runs with random faults, for tests and `bench/replay.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from repeatable_runs import KINDS, FlippedBit, letters_reward, make_trainer

from groupgrad.apps.replay import Bisection, Replay, bisect, replay

STEPS = 12
"""Steps of each run."""
ROWS = 8
"""Rows of each step."""


class OneReward:
    """Changes one reward of one step."""

    __name__ = "letters_reward"

    def __init__(self, step: int):
        self._step = step

    def __call__(self, completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any) -> list[float]:
        rewards = letters_reward(completion_ids)
        if trainer_state.global_step == self._step - 1:
            rewards[6] += 0.5
        return rewards


def faulty(folder: Path, step: int, fault: str) -> Callable[[], Any]:
    """Makes a trainer with a fault at a step: `bit` flips one bit of one weight, `reward` changes one reward."""
    if fault == "bit":
        return lambda: make_trainer(folder, max_steps=STEPS, callbacks=[FlippedBit(step)])
    return lambda: make_trainer(folder, max_steps=STEPS, reward=OneReward(step))


def numbers_of(result: Replay) -> int:
    """Numbers that a replay has compared with the record."""
    compared = result.compared
    return compared.tokens + compared.numbers + compared.metrics


def random_replays(run_of: Callable[[str], Path], unused: Path, count: int) -> Iterator[tuple[str, Replay]]:
    """Replays random steps and rows of every kind of run; `run_of` gives the folder of a finished run of a kind."""
    generator = random.Random(18)
    for place in range(count):
        kind = list(KINDS)[place % len(KINDS)]
        run, step, row = run_of(kind), generator.randint(1, STEPS), generator.randrange(ROWS)
        yield kind, replay(make_trainer(unused, **KINDS[kind]), run, step, row=row)


def random_faults(clean: Path, folder: Path, count: int) -> Iterator[tuple[str, int, Bisection]]:
    """Bisects a clean run and runs with a fault at a random step: the fault, its step, and the result."""
    generator = random.Random(18)
    for place in range(count):
        fault, step = ("bit", "reward")[place % 2], generator.randint(1, STEPS - 1)
        run = folder / f"{place}"
        faulty(run, step, fault)().train()
        yield fault, step, bisect(clean, run)
