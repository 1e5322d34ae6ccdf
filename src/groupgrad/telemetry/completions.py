"""What the policy wrote and what it got for it: kept until a log event, then printed, written and sent to trackers."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from groupgrad import dist
from groupgrad.telemetry.completions_table import Columns, print_table
from groupgrad.telemetry.parquet import plain_value, write_records
from groupgrad.telemetry.trackers import log_to_trackers, unique_by_prompt

# Columns with a place of their own; every other column is a reward, an extra or the images.
_FRONT = ("step", "prompt", "completion")
_BACK = ("advantage", "finish_reason", "num_tokens")
_IMAGES = ("image", "images")


class CompletionLog:
    """Completion records between two log events, apart for training and each evaluation.

    `num_to_print` is the number of rows printed, chosen at random but the same in every run: None prints all, 0 none.
    `unique_prompts` leaves one row a prompt in the trackers' tables; `log_multimodal` puts images there. `report_to`
    names the trackers. Files go to `<output_dir>/completions/`. Attributes may be changed between flushes.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        num_to_print: int | None = None,
        unique_prompts: bool = False,
        log_multimodal: bool = True,
        report_to: Sequence[str] | str = (),
    ) -> None:
        self.folder = Path(output_dir) / "completions"
        self.num_to_print = num_to_print
        self.unique_prompts = unique_prompts
        self.log_multimodal = log_multimodal
        self.report_to = (report_to,) if isinstance(report_to, str) else tuple(report_to)
        self.console: Console | None = None
        """Where tables are printed; None is standard output as it is at the time."""
        self._records: dict[str, list[dict[str, Any]]] = {}
        self._reward_names: dict[str, list[str]] = {}

    def __len__(self) -> int:
        """Records waiting, of all phases."""
        return sum(len(records) for records in self._records.values())

    def add(
        self, records: Sequence[Mapping[str, Any]], *, phase: str = "train", reward_names: Sequence[str] | None = None
    ) -> None:
        """Keep records until the next flush of `phase`. No collective: call it where all ranks' records are.

        A record has `step`, `prompt` and `completion` (text or messages), one column per reward, `advantage`,
        `finish_reason`, `num_tokens` and any further columns; a column that a record lacks is None. `reward_names` says
        which columns are rewards; None takes those that stand between `completion` and `advantage`.
        """
        for record in records:
            names = _rewards_by_place(record) if reward_names is None else reward_names
            known = self._reward_names.setdefault(phase, [])
            known.extend(name for name in names if name not in known)
        self._records.setdefault(phase, []).extend(dict(record) for record in records)

    def flush(self, step: int, phase: str = "train") -> Path | None:
        """Print, write and send the records of `phase`, and forget them; the file written, or None without records.

        `phase` is `train` (file `completions_00010.parquet`) or the prefix of an evaluation's metrics: `eval`
        (`eval_00010.parquet`) or `eval_<name>`. An existing file is never overwritten: `_2`, `_3`, ... are appended.
        Other ranks than the first only forget. No collective.
        """
        records = self._records.pop(phase, [])
        rewards = self._reward_names.pop(phase, [])
        if not records or not dist.is_main():
            return None
        records = _completed(records, rewards, step)
        stem = "completions" if phase == "train" else re.sub(r"[^\w.-]+", "_", phase)
        stored = [{key: value for key, value in record.items() if key not in _IMAGES} for record in records]
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
        """The waiting records in plain values; images become a marker. No collective."""
        return {
            "records": {phase: [plain_value(record) for record in records] for phase, records in self._records.items()},
            "reward_names": {phase: list(names) for phase, names in self._reward_names.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; records waiting before are dropped."""
        self._records = {phase: [dict(record) for record in records] for phase, records in state["records"].items()}
        self._reward_names = {phase: list(names) for phase, names in state["reward_names"].items()}

    def _print(self, records: list[dict[str, Any]], rewards: list[str], step: int, phase: str) -> None:
        chosen = records
        if self.num_to_print is not None and self.num_to_print < len(records):
            # Of its own stream: printing must not move the random numbers that training draws.
            picks = random.Random(f"{step}-{phase}").sample(range(len(records)), max(self.num_to_print, 0))
            chosen = [records[index] for index in sorted(picks)]
        if not chosen:
            return
        extras = [key for key in records[0] if key not in (*_FRONT, *_BACK, *_IMAGES, *rewards)]
        title = f"Step {step}" if phase == "train" else f"Step {step} ({phase})"
        with tqdm.external_write_mode():
            print_table(chosen, Columns(rewards, extras), title=title, console=self.console)


def _rewards_by_place(record: Mapping[str, Any]) -> list[str]:
    keys = list(record)
    if "completion" not in keys or "advantage" not in keys:
        return []
    between = keys[keys.index("completion") + 1 : keys.index("advantage")]
    return [key for key in between if key not in (*_FRONT, *_BACK, *_IMAGES)]


def _completed(records: list[dict[str, Any]], rewards: list[str], step: int) -> list[dict[str, Any]]:
    """Every record with every column, in one order: the fixed ones, rewards before the advantage, then the extras."""
    keys = dict.fromkeys([*_FRONT, *rewards, *_BACK, *(key for record in records for key in record)])
    rows = [{key: record.get(key) for key in keys} for record in records]
    for row in rows:
        row["step"] = step if row["step"] is None else row["step"]
    return rows
