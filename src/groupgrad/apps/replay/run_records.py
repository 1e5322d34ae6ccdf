"""Reads what a run has recorded about its steps, without measured times."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.checkpoints.saving import checkpoints_in, step_of
from groupgrad.run_folder import run_files
from groupgrad.run_folder.run_files import parse_rollout_file, read_lines

TIMES = re.compile(r"(^|_)time/|step_time|runtime|per_second|latency_s$|tools/wait_")
"""Metrics that are measured times, which no two runs share."""
TIME_COLUMNS = re.compile(r"seconds/.*|wait_s")
"""Columns of rollouts that are measured times."""


class RunRecords:
    """The records of one run. NoRun if there is no run at `path`."""

    def __init__(self, path: str | Path, name: str | None = None):
        self.folder = RunFolder(path)
        self.path = self.folder.path
        self.name = name or str(path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of `run_config.json`; empty without one."""
        return self.folder.config()

    def logged_before(self, step: int) -> int:
        """The last step before `step` at which training has logged; 0 if there is none."""
        return max((number for number, line in self.metrics.items() if number < step and "loss" in line), default=0)

    @cached_property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """Step → its numbers by name, without times; `eval_` names are of evaluations."""
        found: dict[int, dict[str, Any]] = {}
        for line in read_lines(self.path / run_files.METRICS):
            step = line.get("step")
            if isinstance(step, int) and "train_runtime" not in line:  # the last line is of the training, not of a step
                numbers = {k: v for k, v in line.items() if k not in ("step", "time") and not TIMES.search(k)}
                found.setdefault(step, {}).update(numbers)
        return found

    @cached_property
    def digests(self) -> dict[int, str]:
        """Step → digest of the trained weights after it; 0 is the start."""
        lines = read_lines(self.path / run_files.WEIGHTS)
        return {line["step"]: line["digest"] for line in lines if "step" in line and "digest" in line}

    @cached_property
    def first_digest(self) -> str | None:
        """Digest of all weights at the start, those of the base of an adapter too; None if it is not recorded."""
        lines = read_lines(self.path / run_files.WEIGHTS)
        return next((line.get("all") for line in lines if line.get("step") == 0), None)

    @cached_property
    def files(self) -> dict[int, list[Path]]:
        """Step → its files of rollouts, by rank."""
        folder, found = self.path / run_files.ROLLOUTS, {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            place = parse_rollout_file(path.name)
            if place is not None:
                found.setdefault(place[0], []).append(path)
        return dict(sorted(found.items()))

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step → checkpoint, by step."""
        return {step_of(path): path for path in checkpoints_in(self.path)}

    @property
    def last_step(self) -> int:
        """The last step of which anything is recorded; 0 if none is."""
        return max([0, *self.metrics, *self.digests, *self.files, *self.checkpoints])

    @cached_property
    def resumed_at(self) -> int:
        """The step from which the last start went on, which may have other settings; 0 for a run that was not resumed.

        The turns of a sweep's arm, which begin after a pause, all have the same settings and are one start.
        """
        kinds = ("started", "resumed", "paused")
        events = [event for event in read_lines(self.path / run_files.EVENTS) if event.get("event") in kinds]
        starts = [
            now
            for before, now in zip([{}, *events], events)
            if now["event"] != "paused" and before.get("event") != "paused"
        ]
        return int(starts[-1].get("step", 0)) if starts else 0

    def rollouts(self, step: int) -> pa.Table | None:
        """The rows that a step sampled, of all ranks, by row number, without times; None where none are stored."""
        paths = self.files.get(step)
        if not paths:
            return None
        table = pa.concat_tables([pq.read_table(path) for path in paths], promote_options="default")
        names = [name for name in table.column_names if not TIME_COLUMNS.fullmatch(name)]
        order = pc.sort_indices(table, [("row", "ascending")])  # pyright: ignore[reportAttributeAccessIssue]
        return table.select(names).take(order).combine_chunks()
