"""Finds the step at which two runs diverge, from their records."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupgrad.apps.replay.differences import Compared, compare_settings, compare_step, compare_weights
from groupgrad.apps.replay.run_records import RunRecords
from groupgrad.trainer.changed_options import deciding


@dataclass(slots=True)
class Bisection:
    """The first difference of two runs, and the records that show it."""

    first: RunRecords
    second: RunRecords
    settings: dict[str, tuple[Any, Any]]
    """Differences of the configurations, except in names of folders and the like."""
    weights_at_start: str
    """`the same bits`, `different` or why they are not known."""
    compared: Compared
    last_compared: int = 0
    weights: dict[int, list[str]] = field(default_factory=dict)
    """Step of a checkpoint of both → names of the tensors that differ."""
    known_same: int = 0
    """The last step after which the weights are known to be the same."""
    first_step: int | None = None
    """The first step that is known to differ; None if nothing differs."""

    @property
    def extent(self) -> str:
        """The steps whose records were compared."""
        one, two = self.first.last_step, self.second.last_step
        lengths = "step 1" if self.last_compared == 1 else f"steps 1 to {self.last_compared}"
        return lengths if one == two else f"{lengths}; {self.first.name} has {one} and {self.second.name} {two}"

    @property
    def open_steps(self) -> list[int]:
        """Steps before the first known difference after which the weights may differ already."""
        return [] if self.first_step is None else list(range(self.known_same + 1, self.first_step))

    @property
    def conclusion(self) -> str:
        """One sentence on the step at which the runs part."""
        if self.first_step is None:
            return "no difference was found"
        if not self.open_steps:
            return f"The runs part in step {self.first_step}."
        first, last = self.open_steps[0], self.open_steps[-1]
        steps = f"step {first} has" if first == last else f"steps {first} to {last} have"
        return (
            f"Step {self.first_step} is the first whose records differ. What {steps} recorded is the same, but the "
            f"weights that it left are not recorded and may differ already."
        )


def bisect(first: str | Path | RunRecords, second: str | Path | RunRecords) -> Bisection:
    """Compares two runs: configuration, weights at the start, then step by step what they sampled and computed.

    The records of every step up to the first difference are read, since a record may differ where later ones do not.
    NoRun if there is no run.
    """
    one, two = (run if isinstance(run, RunRecords) else RunRecords(run) for run in (first, second))
    result = Bisection(one, two, _settings(one, two), _start(one, two), Compared())
    last = min(one.last_step, two.last_step)
    for step in range(1, last + 1):
        result.last_compared = step
        # A logged number is a mean over the steps since the last log.
        found = compare_step(one, two, step, metrics=one.logged_before(step) == two.logged_before(step))
        result.compared += found
        if found.differences:
            result.first_step = step
            break
        if step in one.digests and step in two.digests:
            result.known_same = step
    _compare_checkpoints(result)
    return result


def _settings(one: RunRecords, two: RunRecords) -> dict[str, tuple[Any, Any]]:
    """Differences in what decides results: settings, model, rewards, data, processes, threads, versions and so on."""
    found = compare_settings(deciding(one.config.get("settings", {})), deciding(two.config.get("settings", {})))
    kinds = ("model", "dtype", "quantization", "rewards", "reward_functions", "data")
    kinds = (*kinds, "processes", "threads", "max_steps")
    recorded = [kind for kind in kinds if kind in one.config and kind in two.config]  # earlier releases wrote fewer
    found |= compare_settings(*({kind: run.config[kind] for kind in recorded} for run in (one, two)))
    adapters = [run.config.get("adapter") or {} for run in (one, two)]
    found |= compare_settings(*({f"adapter.{name}": value for name, value in given.items()} for given in adapters))
    found |= compare_settings(one.config.get("versions", {}), two.config.get("versions", {}))
    return found


def _start(one: RunRecords, two: RunRecords) -> str:
    first, second = one.first_digest, two.first_digest
    if first is None or second is None:
        return "not recorded by both"
    return "the same digest" if first == second else f"different: digest {first} and {second}"


def _compare_checkpoints(result: Bisection) -> None:
    """Compares the weights of the checkpoints of both up to the first difference, until the first that differs."""
    one, two = result.first.checkpoints, result.second.checkpoints
    last = result.last_compared
    for step in sorted(step for step in one if step in two and step <= last):
        result.weights[step] = compare_weights(one[step], two[step])
        if result.weights[step]:
            result.first_step = step if result.first_step is None else min(step, result.first_step)
            return
        result.known_same = max(result.known_same, step)
