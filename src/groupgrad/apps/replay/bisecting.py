"""Finds the step at which two runs diverge, from their records, and by replays if records leave several steps open."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupgrad.apps.replay.differences import Compared, compare_settings, compare_step, compare_weights
from groupgrad.apps.replay.replaying import ReplayStart, check_processes, find_start, repeat
from groupgrad.apps.replay.run_records import RunRecords
from groupgrad.trainer.changed_options import deciding

MakeTrainer = Callable[[], Any]


@dataclass(slots=True)
class Bisection:
    """The first difference of two runs, and the records or replays that show it."""

    first: RunRecords
    second: RunRecords
    settings: dict[str, tuple[Any, Any]]
    """Differences of the configurations, except in names of folders and the like."""
    weights_at_start: str
    """`the same bits`, `different` or why they are not known."""
    compared: Compared
    last_compared: int = 0
    weights: dict[int, tuple[int, tuple[int, str, str] | None]] = field(default_factory=dict)
    """Step of a checkpoint of both → as in `Replay.weights`."""
    known_same: int = 0
    """The last step after which the weights are known to be the same."""
    first_step: int | None = None
    """The first step that is known to differ; None if nothing differs."""
    replays: int = 0
    findings: list[str] = field(default_factory=list)
    """Results of the replays, in sentences."""

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
        advice = "" if self.replays else "; --replay repeats them and finds the step"
        return (
            f"Step {self.first_step} is the first whose records differ. What {steps} recorded is the same, but the "
            f"weights that it left are not recorded and may differ already{advice}."
        )


def bisect(
    first: str | Path | RunRecords,
    second: str | Path | RunRecords,
    *,
    make_first: MakeTrainer | None = None,
    make_second: MakeTrainer | None = None,
) -> Bisection:
    """Compares two runs: configuration, weights at the start, then step by step what they sampled and computed.

    The records of every step up to the first difference are read, since a record may differ where later ones do not.
    With `make_first` or `make_second`, which return a new trainer like that of the run, this run is repeated once from
    the last checkpoint that both share to the first difference: that names the step where weights that are not recorded
    differ, and says which of the two runs repeats what it recorded. NoRun if there is no run, ReplayError
    for a run that several processes have trained and that is to be repeated.
    """
    one, two = (run if isinstance(run, RunRecords) else RunRecords(run) for run in (first, second))
    for records, make in ((one, make_first), (two, make_second)):
        if make is not None:
            check_processes(records)
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
    makers = [make for make in (make_first, make_second) if make is not None]
    if makers and result.first_step is not None:
        _replay_both(result, make_first, make_second)
    return result


def _settings(one: RunRecords, two: RunRecords) -> dict[str, tuple[Any, Any]]:
    """Differences in what decides results: settings, model, rewards, data, processes, threads, versions and so on."""
    found = compare_settings(deciding(one.config.get("settings", {})), deciding(two.config.get("settings", {})))
    kinds = (
        "model",
        "dtype",
        "quantization",
        "rewards",
        "reward_functions",
        "data",
        "processes",
        "threads",
        "max_steps",
    )
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
        found = result.weights[step] = compare_weights(one[step], two[step])
        if found[1] is not None:
            result.first_step = step if result.first_step is None else min(step, result.first_step)
            return
        result.known_same = max(result.known_same, step)


def _replay_both(result: Bisection, make_first: MakeTrainer | None, make_second: MakeTrainer | None) -> None:
    """Repeats the runs from the last checkpoint before which both are the same to the first difference."""
    last = result.first_step
    assert last is not None
    runs = [(result.first, make_first), (result.second, make_second)]
    again: list[RunRecords] = []
    folder = Path(tempfile.mkdtemp(prefix="groupgrad-bisect-"))
    try:
        for place, (run, make) in enumerate(runs):
            if make is None:
                continue
            # The newest checkpoint at which both runs are known to be the same, or the start.
            start = find_start(run, min(last, result.known_same + 1))
            again.append(repeat(make(), run, start, last, folder / str(place), saves=[last]))
            result.replays += 1
            result.findings += [f"{run.name}: note: {note}" for note in start.notes]
            result.findings.append(_repeats(run, again[-1], start, last))
        if len(again) == 2:
            _compare_replays(result, again[0], again[1], last)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _repeats(run: RunRecords, again: RunRecords, start: ReplayStart, last: int) -> str:
    """Says whether a run's replay is what it recorded, and where not."""
    origin = "the start" if start.checkpoint is None else start.checkpoint.name
    head = f"{run.name} repeated from {origin} to step {last}"
    for step in range(start.step + 1, last + 1):
        found = compare_step(run, again, step, evaluations=False)
        if found.differences:
            return f"{head} is NOT what it recorded; {found.differences[0].text('the record', 'the replay')}"
        if step == last and step in run.checkpoints:
            total, place = compare_weights(run.checkpoints[step], again.checkpoints[step])
            if place is not None:
                return f"{head} does NOT end with its weights: {place[0]:,} of {total:,} differ, first {place[1]}"
    return f"{head} is what it recorded, 0 bits differ"


def _compare_replays(result: Bisection, one: RunRecords, two: RunRecords, last: int) -> None:
    """Finds the first step at which the replays differ, in records and in the weights after each step."""
    for step in range(1, last + 1):
        found = compare_step(one, two, step, evaluations=False, optional=True)
        if found.differences:
            result.first_step, result.known_same = step, step - 1
            text = found.differences[0].text(result.first.name, result.second.name)
            result.findings.append(f"the replays part at {text}")
            break
    else:
        result.findings.append(
            "the replays are the same, so the difference does not repeat: it came from outside of what the two "
            "configurations decide, such as a faulty machine, a reward that varies, or a changed file"
        )
        return
    if last in one.checkpoints and last in two.checkpoints:
        total, place = compare_weights(one.checkpoints[last], two.checkpoints[last])
        if place is not None:
            result.findings.append(
                f"weights after step {last}: {place[0]:,} of {total:,} differ, first {place[1]}: {place[2]}"
            )
