"""Converts a run to JSON-compatible values, which both the live page and the static report show."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, Protocol

from groupgrad.apps.runs.run_folder import RunFolder, with_words
from groupgrad.apps.runs.selection import Selection
from groupgrad.apps.view import evaluations
from groupgrad.run_folder.advice import advice
from groupgrad.run_folder.rollout_table import TRAINING

MAX_POINTS = 4000
"""Log events of a run that the page gets; of a longer run every second, third, ... one."""
MAX_EVENTS = 300
FILES_AT_ONCE = 32
"""Files of rollouts that one answer waits for."""
REPORT_GROUPS, REPORT_EVAL_GROUPS = 40, 10
"""Groups of rollouts in a static report: of the training of each run, and of each of its evaluations."""
REPORT_IMAGE_BYTES = 32 * 2**20
"""Images of these rollouts in a static report, at most, for each run."""


class SweepPanel(Protocol):
    """A sweep whose arms the page lists and gives commands to."""

    def table(self) -> dict[str, Any]:
        """Its arms, what it has cost and the last commands, as plain types for JSON."""
        ...

    def act(self, kind: str, arm: int, settings: Sequence[str], *, from_weights: bool) -> str:
        """Gives a command and returns the message for the user. `settings` are `KEY=VALUE`, the changes of a clone.
        ValueError, with the reason, if it is refused."""
        ...


def heading(run: RunFolder) -> dict[str, Any]:
    """Name, state and steps of a run, and the size of its metrics, which grows with each log event."""
    state = run.state() if run.path.is_dir() else "deleted"
    numbers = {"step": run.steps_made(), "size": run.metrics_size()}
    return {"name": run.name, "path": str(run.path), "state": state, **numbers}


def summary(run: RunFolder) -> dict[str, Any]:
    """Name, state, steps, settings, events and warnings of a run."""
    config = run.config()
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state(),
        "step": run.steps_made(),
        "config": config,
        "max_steps": config.get("max_steps"),
        "events": run.events()[-MAX_EVENTS:],
        "advice": advice(run.metrics()),
    }


def metrics(run: RunFolder, start: str = "0") -> dict[str, Any]:
    """The log events from a position on, thinned if they are many, and the position to go on from.

    `reset` says that they are all of the file, since it has been written anew.
    """
    found = run.metrics_from(start)
    lines, position = run.metrics_from("0") or ([], "0") if found is None else found
    reset = start == "0" or found is None
    stride = math.ceil(len(lines) / MAX_POINTS)
    if stride > 1:
        train = [line for line in lines if "loss" in line]
        kept = {id(line) for line in [*train[::stride], *train[-1:]]}
        lines = [line for line in lines if "loss" not in line or id(line) in kept]
    return {"lines": lines, "next": position, "reset": reset}


def rollouts(
    run: RunFolder,
    selection: Selection,
    *,
    sort: str,
    descending: bool,
    offset: int,
    limit: int,
    chosen: tuple[int, int, str] | None = None,
) -> dict[str, Any]:
    """Some of the rows that are selected, the number of all of them, and the place of the chosen (step, row, phase)."""
    complete = run.refresh(limit=FILES_AT_ONCE, wait=False)
    total, rows = run.find(selection, sort=sort, descending=descending, offset=offset, limit=limit)
    place = None if chosen is None else run.place(chosen, selection, sort=sort, descending=descending)
    return {"total": total, "rows": rows, "complete": complete, "facets": run.facets(), "place": place}


def report(runs: Sequence[RunFolder], sweeps: Sequence[SweepPanel] = ()) -> dict[str, Any]:
    """All that a static report holds: metrics, settings, some groups of rollouts over the whole run, and the arms of
    sweeps."""
    parts = []
    for run in runs:
        run.refresh()
        facets = run.facets()
        rows = [row for phase in facets["phases"] for row in _groups_of_report(run, phase)]
        shown = {"rollouts": rows, "images": _images_of_report(run, rows), "facets": facets}
        shown["evaluations"] = {"own": evaluations.compared(run), "0": evaluations.compared(run, runs[0])}
        parts.append({**summary(run), "metrics": metrics(run)["lines"], **shown})
    return {"runs": parts, "sweeps": [sweep.table() for sweep in sweeps]}


def _groups_of_report(run: RunFolder, phase: str) -> list[dict[str, Any]]:
    """The rows of one group of each of some steps; another group in each step, since groups keep their numbers."""
    table, count = run.index(), REPORT_GROUPS if phase == TRAINING else REPORT_EVAL_GROUPS
    steps = {step for step, of in zip(table["step"].to_pylist(), table["phase"].to_pylist()) if of == phase}
    rows = []
    for place, step in enumerate(_evenly_chosen(sorted(steps), count)):
        of_step = run.rows(step, phase=phase)
        for row in of_step:
            row.pop("prompt_ids", None)  # the page shows the prompt's text
        groups = sorted({row["group"] for row in of_step})
        rows += [with_words(row) for row in of_step if row["group"] == groups[place % len(groups)]]
    return rows


def _images_of_report(run: RunFolder, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The images of these rows as addresses that hold them, by name, up to `REPORT_IMAGE_BYTES`."""
    found: dict[str, str] = {}
    size = 0
    for name in dict.fromkeys(name for row in rows for name in row.get("images") or ()):
        path = run.image(name)
        if path is not None and size + path.stat().st_size <= REPORT_IMAGE_BYTES:
            size += path.stat().st_size
            found[name] = f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return found


def _evenly_chosen(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` steps, evenly, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]
