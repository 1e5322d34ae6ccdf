"""TRL's table of completions: a view of the rollouts of all ranks since the last log event.

It is written to `completions/`, printed, sent to trackers, and uploaded to a data set on the hub.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import CommitScheduler
from rich.console import Console
from tqdm import tqdm

from groupgrad import dist
from groupgrad.data.images import COLUMNS as IMAGE_COLUMNS
from groupgrad.data.images import column_images
from groupgrad.run_folder.render import images_of, plain_text, plain_value
from groupgrad.run_folder.run_files import replace_file
from groupgrad.run_folder.terminal import output_may_fail, print_table
from groupgrad.types import RewardTable, Rollout

logger = logging.getLogger(__name__)

TABLE_COLUMNS = ("step", "prompt", "completion", "advantage", "finish_reason", "num_tokens")
"""Columns of every table, beside rewards and what reward functions log by `log_extra`."""
UPLOAD_MINUTES = 2
"""Between two uploads; without new files there is none."""
_CURRENT_RUN: dict[str, Callable[[Any], Any]] = {
    "wandb": lambda wandb: wandb.run,
    "trackio": lambda trackio: trackio.context_vars.current_run.get(),
}
"""Tracker that gets the table -> function that reads its current run; None outside of a run."""


class CompletionLog:
    """Holds the completions of training and of each evaluation until they are flushed.

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

    def add(
        self,
        rollouts: Sequence[Rollout],
        table: RewardTable,
        advantages: Sequence[float],
        step: int,
        *,
        phase: str = "train",
    ) -> None:
        """Collective. Keeps a generation batch of all ranks, in row order, on the main process until the next flush.

        `rollouts` are this rank's, with their rewards and (B,) advantages; `step` is the number of optimizer steps
        before they were sampled.
        """
        records = completion_records(rollouts, table, advantages, step)
        if not self.log_multimodal or not self._trackers():
            records = [plain_value(record) for record in records]  # with a marker for each image
        by_row = dict(zip((rollout.index for rollout in rollouts), records))
        parts = dist.all_gather_objects((table.names, by_row))
        if dist.is_main():
            names = [*self._reward_names.get(phase, ()), *(name for found, _ in parts for name in found)]
            self._reward_names[phase] = list(dict.fromkeys(names))
            all_rows = {row: record for _, found in parts for row, record in found.items()}
            self._records.setdefault(phase, []).extend(all_rows[row] for row in sorted(all_rows))

    def flush(self, step: int, phase: str = "train") -> Path | None:
        """Writes, prints, sends and drops the records of `phase`. Returns the file, or None without records.

        `phase` is `train` (file `completions_00010.parquet`) or the metric prefix of an evaluation, `eval` or
        `eval_<name>` (`eval_00010.parquet`). An existing file is not overwritten: `_2`, `_3`, ... are appended. No
        collective.
        """
        records = self._records.pop(phase, [])
        rewards = self._reward_names.pop(phase, [])
        if not records or not dist.is_main():
            return None
        stem = "completions" if phase == "train" else re.sub(r"[^\w.-]+", "_", phase)
        stem = f"{stem}_{step:05d}"
        names = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
        path = next(path for name in names if not (path := self.folder / f"{name}.parquet").exists())
        table = to_table(records, number_columns=[*rewards, "advantage"])
        replace_file(path, lambda aside: pq.write_table(table, aside))  # so an upload finds whole files
        self._print(records, rewards, step, phase)
        self._send(_one_a_prompt(records) if self.unique_prompts else records, step)
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

    def _trackers(self) -> list[str]:
        return [name for name in _CURRENT_RUN if name in self.report_to or "all" in self.report_to]

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

    def _send(self, records: Sequence[Mapping[str, Any]], step: int) -> None:
        """Logs the records as a table to each tracker that has a run. A lost table is a warning and ends no run."""
        for name in self._trackers():
            try:
                tracker = importlib.import_module(name)
            except ImportError:
                continue
            try:
                if _CURRENT_RUN[name](tracker) is not None:
                    frame = _frame(records, tracker.Image if self.log_multimodal else None)
                    tracker.log({"completions": tracker.Table(dataframe=frame), "train/global_step": step})
            except Exception as error:
                logger.warning("the completions table of step %d was not logged to %s: %r", step, name, error)


class CompletionsUpload(CommitScheduler):
    """Commits new parquet files of a folder to a data set on the hub, every two minutes and when `finish` is called.

    ValueError if the data set `repo_id` cannot be created or reached. A later upload that fails is reported and tried
    again with the next one.
    """

    def __init__(self, folder: Path, repo_id: str, *, token: str | None = None, private: bool | None = None) -> None:
        options: dict[str, Any] = {"repo_type": "dataset", "every": UPLOAD_MINUTES, "allow_patterns": "*.parquet"}
        try:
            super().__init__(repo_id=repo_id, folder_path=folder, token=token, private=private, **options)
        except Exception as error:  # the hub's client raises errors of its own, of HTTP and of the system
            raise ValueError(
                f"log_completions_hub_repo={repo_id!r} cannot be written to: {type(error).__name__}: {error}; log in "
                "with `hf auth login`, set hub_token, or leave log_completions_hub_repo unset"
            ) from error

    def finish(self) -> None:
        """Uploads what is new and waits for it. A failure is a warning: the files are in the folder."""
        try:
            self.trigger().result()
        except Exception as error:  # a lost upload must not end a run
            text = "completions could not be uploaded to %r (%s: %s); they are in %s"
            logger.warning(text, self.repo_id, type(error).__name__, error, self.folder_path)


def completion_records(
    rollouts: Sequence[Rollout], table: RewardTable, advantages: Sequence[float], step: int
) -> list[dict[str, Any]]:
    """Rollouts under the names of TRL's columns: texts, a column for each reward function, what functions logged."""
    return [
        {
            "step": step,
            "prompt": rollout.prompt.row["prompt"],
            "completion": rollout.completion,
            **{name: None if math.isnan(reward) else reward for name, reward in zip(table.names, rewards)},
            "advantage": advantages[row],
            "finish_reason": rollout.finish_reason,
            "num_tokens": rollout.num_sampled,
            **{column: values[row] for column, values in table.columns.items()},
        }
        for row, (rollout, rewards) in enumerate(zip(rollouts, table.rewards.tolist()))
    ]


def distinct_names(names: list[str]) -> list[str]:
    """Numbers repeated names (`f`, `f_2`, `f_3`) and names that equal a column of the completions table."""
    distinct: list[str] = []
    for name in names:
        taken = {*TABLE_COLUMNS, *distinct}
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        free = (other for other in numbered if other not in taken and other not in names)
        distinct.append(next(free) if name in taken else name)
    return distinct


def to_table(records: Sequence[Mapping[str, Any]], *, number_columns: Sequence[str] = ()) -> pa.Table:
    """One column a key but those of images, in the order first seen, with null where a record lacks the key.

    `number_columns` are float64, with null for None and NaN. Other columns keep their structure (messages become lists
    of structs) if one type fits all rows, and are JSON text otherwise. Images become a marker.
    """
    keys = dict.fromkeys(key for record in records for key in record if key not in IMAGE_COLUMNS)
    values = {str(key): [plain_value(record.get(key)) for record in records] for key in keys}
    return pa.table({key: _column(of, is_number=key in number_columns) for key, of in values.items()})


def _column(values: list[Any], *, is_number: bool) -> pa.Array:
    if is_number:
        return pa.array(values, pa.float64(), from_pandas=True)  # which makes null of NaN
    try:
        column = pa.array(values)
        if "struct<>" not in str(column.type):  # that of `{}`, which parquet cannot store
            return column
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        pass
    texts = [json.dumps(value, ensure_ascii=False, default=lambda of: of.decode(errors="replace")) for value in values]
    return pa.array([None if value is None else text for value, text in zip(values, texts)], pa.string())


def _frame(records: Sequence[Mapping[str, Any]], image_class: Any) -> pd.DataFrame:
    """The records for a tracker: structured values as text, and images in a column `image` of `image_class`."""
    keys = dict.fromkeys(key for record in records for key in record if key not in IMAGE_COLUMNS)
    columns: dict[str, list[Any]] = {key: [_cell(key, record.get(key)) for record in records] for key in keys}
    if image_class is not None:
        cells = [[image_class(image) for image in _images(record)] for record in records]
        if any(cells):
            # Both trackers display a single image larger than a list of one image.
            if all(len(images) <= 1 for images in cells):
                cells = [images[0] if images else None for images in cells]
            columns["image"] = cells
    return pd.DataFrame(columns)


def _cell(key: str, value: Any) -> Any:
    if key in ("prompt", "completion"):
        return plain_text(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(plain_value(value))


def _images(record: Mapping[str, Any]) -> list[Any]:
    """The images of a record's `images` or `image` column, or else of its messages."""
    return column_images(record)[1] or [*images_of(record.get("prompt")), *images_of(record.get("completion"))]


def _one_a_prompt(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first record of each distinct prompt; prompts with other images are distinct."""
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for record in records:
        images = images_of(record["prompt"])
        keys = ((image.size, image.tobytes()) if hasattr(image, "tobytes") else str(image) for image in images)
        first.setdefault((plain_text(record["prompt"]), *keys), record)
    return list(first.values())
