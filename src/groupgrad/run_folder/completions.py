"""Collects completion records between log events, then writes, prints and sends them to trackers."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from groupgrad import dist
from groupgrad.data.images import COLUMNS as IMAGE_COLUMNS
from groupgrad.run_folder.completions_upload import CompletionsUpload
from groupgrad.run_folder.parquet import write_records
from groupgrad.run_folder.render import plain_value
from groupgrad.run_folder.terminal import output_may_fail, print_table
from groupgrad.run_folder.trackers import log_to_trackers, unique_by_prompt

TABLE_COLUMNS = ("step", "prompt", "completion", "advantage", "finish_reason", "num_tokens")
"""Columns that every record has, beside its rewards."""


class CompletionLog:
    """Holds the completion records of training and of each evaluation until they are flushed.

    `num_to_print` rows, a random sample that is the same in every run, are printed; None prints all, 0 none.
    `unique_prompts` sends one row a prompt to the trackers; `log_multimodal` sends images too. `report_to` names the
    trackers. Files go to `<output_dir>/completions/`, and from there to the hub by `upload`. Attributes may be changed
    between flushes.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        num_to_print: int | None = None,
        unique_prompts: bool = False,
        log_multimodal: bool = True,
        report_to: Sequence[str] | str = (),
        upload: CompletionsUpload | None = None,
    ) -> None:
        self.folder = Path(output_dir) / "completions"
        self.num_to_print = num_to_print
        self.unique_prompts = unique_prompts
        self.log_multimodal = log_multimodal
        self.report_to = (report_to,) if isinstance(report_to, str) else tuple(report_to)
        self.upload = upload
        self.console: Console | None = None
        """Console for the printed tables; None prints to the current standard output."""
        self._records: dict[str, list[dict[str, Any]]] = {}
        self._reward_names: dict[str, list[str]] = {}

    def add(self, records: Sequence[Mapping[str, Any]], *, reward_names: Sequence[str], phase: str = "train") -> None:
        """Keeps records until the next flush of `phase`. No collective: only the rank that has all records adds any.

        A record has `TABLE_COLUMNS` (prompt and completion as text or messages), one column per reward, and any extra
        columns; a missing column is None.
        """
        if records:
            names = [*self._reward_names.get(phase, ()), *reward_names]
            self._reward_names[phase] = list(dict.fromkeys(names))
        self._records.setdefault(phase, []).extend(dict(record) for record in records)

    def flush(self, step: int, phase: str = "train") -> Path | None:
        """Writes, prints, sends and drops the records of `phase`. Returns the file, or None without records.

        `phase` is `train` (file `completions_00010.parquet`) or the metric prefix of an evaluation, `eval` or
        `eval_<name>` (`eval_00010.parquet`). An existing file is not overwritten: `_2`, `_3`, ... are appended. Ranks
        other than the first only drop their records. No collective.
        """
        records = self._records.pop(phase, [])
        rewards = self._reward_names.pop(phase, [])
        if not records or not dist.is_main():
            return None
        stem = "completions" if phase == "train" else re.sub(r"[^\w.-]+", "_", phase)
        stored = [{key: value for key, value in record.items() if key not in IMAGE_COLUMNS} for record in records]
        with nullcontext() if self.upload is None else self.upload.lock:
            path = write_records(stored, self.folder, f"{stem}_{step:05d}", number_columns=[*rewards, "advantage"])
        self._print(records, rewards, step, phase)
        log_to_trackers(
            unique_by_prompt(records) if self.unique_prompts else records,
            step=step,
            report_to=self.report_to,
            with_images=self.log_multimodal,
        )
        return path

    def state_dict(self) -> dict[str, Any]:
        """Returns the records as plain values, with a marker for each image. No collective."""
        return {
            "records": {phase: [plain_value(record) for record in records] for phase, records in self._records.items()},
            "reward_names": {phase: list(names) for phase, names in self._reward_names.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all records by those of a `state_dict`."""
        self._records = {phase: [dict(record) for record in records] for phase, records in state["records"].items()}
        self._reward_names = {phase: list(names) for phase, names in state["reward_names"].items()}

    def join_states(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The state of rank 0, which has all records; empty on other ranks."""
        return states[0] if dist.is_main() else {"records": {}, "reward_names": {}}

    def _print(self, records: list[dict[str, Any]], rewards: list[str], step: int, phase: str) -> None:
        if self.num_to_print is not None and self.num_to_print < len(records):
            # A generator of its own: printing must not change the random numbers of training.
            rows = random.Random(f"{step}-{phase}").sample(range(len(records)), max(self.num_to_print, 0))
            records = [records[row] for row in sorted(rows)]
        if not records:
            return
        keys = dict.fromkeys(key for record in records for key in record)
        extras = [key for key in keys if key not in (*TABLE_COLUMNS, *rewards, *IMAGE_COLUMNS)]
        title = f"Step {step}" if phase == "train" else f"Step {step} ({phase})"
        with output_may_fail(), tqdm.external_write_mode():
            print_table(records, rewards, extras, title=title, console=self.console)


def distinct_names(names: list[str]) -> list[str]:
    """Numbers repeated names (`f`, `f_2`, `f_3`) and names that equal a column of the completions table."""
    distinct: list[str] = []
    for name in names:
        taken = {*TABLE_COLUMNS, *distinct}
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        free = (other for other in numbered if other not in taken and other not in names)
        distinct.append(next(free) if name in taken else name)
    return distinct
