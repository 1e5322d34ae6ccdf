"""Reads the folder of a run, finished or in progress; see docs/run-folder.md."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from groupgrad.apps.runs.selection import Selection, ordered, pc, rows_with, select, words
from groupgrad.run_folder import run_files
from groupgrad.run_folder.rollout_table import REWARD, SECONDS, TRAINING
from groupgrad.run_folder.run_files import (
    EVENTS,
    METRICS,
    ROLLOUTS,
    WEIGHTS,
    parse_lines,
    parse_rollout_file,
    read_lines,
)

_TAIL_BYTES = 2**17
"""Bytes at the end of a file in which its last line is looked for."""


def read_lines_from(path: Path, position: str = "0") -> tuple[list[dict[str, Any]], str] | None:
    """The records of a file of JSON lines from a position on, and the position to go on from.

    None if the file has been written anew since the position was given. ValueError for a text that is no position.
    """
    if re.fullmatch(r"0|\d+-[0-9a-f]{8}", position) is None:
        raise ValueError(f"start={position!r} is no position; give 0, or the `next` of an earlier answer")
    offset = int(position.partition("-")[0])
    try:
        with path.open("rb") as file:
            if offset > os.fstat(file.fileno()).st_size or _position(file, offset) != position:
                return None
            file.seek(offset)
            data = file.read()
            end = offset + data.rfind(b"\n") + 1
            return parse_lines(data), _position(file, end)
    except OSError:
        return ([], "0") if not offset else None


def _position(file: BinaryIO, offset: int) -> str:
    """An offset with a checksum of the bytes before it, which differ in a file that has been written anew."""
    start = max(0, offset - 512)
    file.seek(start)
    return f"{offset}-{zlib.crc32(file.read(offset - start)):08x}" if offset else "0"


def steps_made(folder: Path) -> int:
    """Optimizer steps that the run in a folder has made, also between two log events; 0 if there is no run.

    Each step adds a digest of the weights; where no process has all weights, the rollouts and the last event tell it.
    """
    try:
        files = [parse_rollout_file(entry.name) for entry in os.scandir(folder / ROLLOUTS)]
    except OSError:
        files = []
    last = [_last_line(folder / name).get("step") for name in (WEIGHTS, METRICS, EVENTS)]
    counts = [step for step in last if isinstance(step, int)]
    return max([*counts, *(place[0] for place in files if place is not None)], default=0)


def _last_line(path: Path) -> dict[str, Any]:
    """The last whole record of a file of JSON lines; empty if there is none in the last `_TAIL_BYTES`."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            records = parse_lines(file.read())
    except OSError:
        return {}
    return records[-1] if records else {}


SAME_START_S = 2.0
"""Difference up to which two times of a process's start are the same."""
HEAD_CHARS = 160
"""Characters of prompt and completion in the table of rollouts."""

FIRST_ROWS_S = 0.02
"""Time between two looks for the first rows that another thread reads."""

_INDEXED = (
    *("step", "row", "group", "policy_version", "prompt_id", "reward", "advantage", "finish_reason", "num_tokens"),
    *("prompt", "completion", "is_messages", "tool_calls"),
)
_SCORED = ("row", "group", "prompt_id", "reward", "finish_reason", "num_tokens", "data", "extra")
_EMPTY = pa.schema([("step", pa.int32()), ("row", pa.int32())]).empty_table()
"""A table of no rollouts."""


class NoRun(ValueError):
    """A path that is no folder of a run; the message says what to give."""


class RunFolder:
    """The files of one run. Methods may be called from several threads, and while the run is written."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.name = self.path.resolve().name
        marks = (run_files.METRICS, run_files.EVENTS, run_files.ROLLOUTS, run_files.CONFIG)
        if not any((self.path / part).exists() for part in marks):
            raise NoRun(
                f"{str(path)!r} holds no run: there is none of {', '.join(marks)}; give the output_dir of a run"
            )
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._parts: dict[str, tuple[tuple[int, int, int], pa.Table]] = {}
        """Name of a file of rollouts → (its step, time and size, its rows without tokens)."""
        self._index: pa.Table | None = None
        self._facets: tuple[pa.Table, dict[str, list[Any]]] | None = None
        self._metrics: tuple[str, list[dict[str, Any]]] = ("0", [])
        """The position up to which the metrics have been read, and their lines."""
        self._matches: dict[str, tuple[int, pa.Array]] = {}

    def config(self) -> dict[str, Any]:
        """The settings of the last start; empty if there are none."""
        try:
            return json.loads((self.path / run_files.CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def events(self) -> list[dict[str, Any]]:
        """All events."""
        return list(read_lines(self.path / run_files.EVENTS))

    def metrics_from(self, position: str) -> tuple[list[dict[str, Any]], str] | None:
        """The lines of the metrics from a position on, and the position to go on from.

        None if the file has been written anew, since the run was resumed.
        """
        return read_lines_from(self.path / run_files.METRICS, position)

    def metrics_size(self) -> int:
        """Bytes of the metrics; 0 before the first log event."""
        try:
            return (self.path / run_files.METRICS).stat().st_size
        except OSError:
            return 0

    def steps_made(self) -> int:
        """Optimizer steps that the run has made, also between two log events."""
        return steps_made(self.path)

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of the metrics; what has been read before is not read again."""
        position, lines_read = self._metrics
        found = self.metrics_from(position)
        if found is None:
            lines_read, found = [], self.metrics_from("0") or ([], "0")
        lines, position = found
        self._metrics = (position, lines_read + lines if lines else lines_read)
        return self._metrics[1]

    def state(self) -> str:
        """`running`, `killed`, `ended`, `paused`, `stopped` or `failed`, by the events since the last start.

        A run of this machine whose process is gone was killed.
        """
        state, start = "ended", {}
        for event in self.events():
            if event.get("event") in ("started", "resumed"):
                state, start = "running", event
            elif event.get("event") in ("ended", "paused", "stopped", "failed"):
                state = event["event"]
        is_here = start.get("host") == socket.gethostname() and isinstance(start.get("pid"), int)
        return "killed" if state == "running" and is_here and not _is_alive(start) else state

    def refresh(self, *, limit: int | None = None, wait: bool = True, pause: Callable[[], None] = lambda: None) -> bool:
        """Reads new files of rollouts, the newest steps first, at most `limit`; False if there are more.

        Without `wait` nothing is read while another thread reads, once there is something to show. `pause` is called
        before each file.
        """
        while not self._reading.acquire(timeout=-1 if wait else FIRST_ROWS_S):
            if self._parts:  # which the other thread has read meanwhile
                return False
        try:
            present = self._files()
            parts = {name: part for name, part in self._parts.items() if present.get(name) == part[0]}
            missing = sorted(
                (name for name in present if name not in parts), key=lambda name: (-present[name][0], name)
            )
            now = missing if limit is None else missing[:limit]

            def read(name: str) -> pa.Table | None:
                pause()
                return self._summary(name)

            with ThreadPoolExecutor(2) as threads:
                tables = list(threads.map(read, now))
            parts |= {name: (present[name], table) for name, table in zip(now, tables) if table is not None}
            with self._lock:
                if now or len(parts) != len(self._parts):
                    self._parts, self._index = parts, None
                    self._matches.clear()
            return len(now) == len(missing)
        finally:
            self._reading.release()

    def index(self) -> pa.Table:
        """All rows that have been read, without tokens, with the first characters of texts."""
        with self._lock:
            if self._index is None:
                tables = [self._parts[name][1] for name in sorted(self._parts)]
                table = pa.concat_tables(tables, promote_options="default").combine_chunks() if tables else _EMPTY
                self._index = table
            return self._index

    def find(
        self, selection: Selection, *, sort: str = "step", descending: bool = True, offset: int = 0, limit: int = 100
    ) -> tuple[int, list[dict[str, Any]]]:
        """The number of rows that are selected, and some of them in order of a column.

        A conversation is shown by its last question and by what the model has answered.
        """
        chosen = self._selected(selection)
        rows = ordered(chosen, sort, descending=descending, offset=offset, limit=limit).to_pylist()
        self._put_words(rows)
        return chosen.num_rows, rows

    def place(self, row: tuple[int, int, str], selection: Selection, *, sort: str, descending: bool) -> int | None:
        """The place of a row, given as (step, row, phase), among those that `find` finds; None if it is not there."""
        table = self._selected(selection)
        names = [name for name in dict.fromkeys((sort, "step", "row", "phase")) if name in table.column_names]
        table = ordered(table.select(names), sort, descending=descending, offset=0, limit=table.num_rows)
        columns = (table[name].to_pylist() for name in ("step", "row", "phase")) if table.num_rows else ()
        return next((place for place, found in enumerate(zip(*columns)) if found == row), None)

    def _selected(self, selection: Selection) -> pa.Table:
        table = self.index()
        return select(table, selection, self._matching(selection.text, table) if selection.text else None)

    def _put_words(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replaces the JSON of conversations by what was said. The index has its first characters alone."""
        wanted = {(row["step"], row["row"], row["phase"]): row for row in rows if row["is_messages"]}
        steps = {step for step, _, _ in wanted}
        for name in [name for name, file in self._files().items() if file[0] in steps] if wanted else ():
            table = self._read(name, ("step", "row", "phase", "prompt", "completion"))
            for whole in [] if table is None else table.to_pylist():
                row = wanted.get((whole["step"], whole["row"], whole.get("phase", TRAINING)))
                if row is not None:
                    row |= _head(whole)

    def rows(
        self, step: int, *, row: int | None = None, group: int | None = None, phase: str = TRAINING
    ) -> list[dict[str, Any]]:
        """The whole rows of a step of training or of an evaluation, or one row or group of them, with their tokens."""
        found: list[dict[str, Any]] = []
        for name, file in sorted(self._files().items()):
            table = self._read(name, None) if file[0] == step else None
            if table is None:
                continue
            for column, value in (("row", row), ("group", group), ("phase", phase)):
                if value is not None and column in table.column_names:
                    table = table.filter(pc.equal(table[column], value))
            found += table.to_pylist()
        return sorted(found, key=lambda item: item["row"])

    def evaluations(self) -> dict[str, list[int]]:
        """The steps of the evaluations whose rollouts are stored, ascending, by the folder of each set."""
        found: dict[str, set[int]] = {}
        for name, (step, _, _) in self._files().items():
            folder = Path(name).parent
            if folder.parent.name == run_files.EVAL_ROLLOUTS:
                found.setdefault(folder.name, set()).add(step)
        return {phase: sorted(steps) for phase, steps in sorted(found.items())}

    def evaluation_files(self, phase: str, step: int) -> tuple[tuple[str, int, int], ...]:
        """The files of an evaluation by their paths within the run's folder, with the time and size of each."""
        folder = Path(run_files.EVAL_ROLLOUTS) / phase
        present = sorted((name, file) for name, file in self._files().items() if Path(name).parent == folder)
        return tuple((name, time, size) for name, (of, time, size) in present if of == step)

    def scores(self, files: Sequence[str]) -> list[dict[str, Any]]:
        """The rewards, lengths, finish reasons and further columns of all rows of some files, by number of the row."""
        tables = [self._read(name, _SCORED) for name in files]
        rows = [row for table in tables if table is not None for row in table.to_pylist()]
        return sorted(rows, key=lambda row: row["row"])

    def facets(self) -> dict[str, list[Any]]:
        """Values to select by: finish reasons, tools, reward functions, and the first and last step."""
        table, facets = self.index(), self._facets
        if facets is None or facets[0] is not table:
            facets = self._facets = (table, _facets(table))
        return facets[1]

    def image(self, name: str) -> Path | None:
        """The file of an image; None if there is none of this name, or the name is none."""
        if not all(char.isalnum() or char == "_" for char in name):
            return None
        path = self.path / run_files.IMAGES / f"{name}.jpg"
        return path if path.is_file() else None

    def _files(self) -> dict[str, tuple[int, int, int]]:
        """Step, time and size of each file of rollouts, by its path within the run's folder."""
        found = {}
        folders = [self.path / run_files.ROLLOUTS, *(self.path / run_files.EVAL_ROLLOUTS).glob("*/")]
        for entry in (entry for folder in folders if folder.is_dir() for entry in os.scandir(folder)):
            place = parse_rollout_file(entry.name)
            if place is not None:
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found[os.path.relpath(entry.path, self.path)] = (place[0], status.st_mtime_ns, status.st_size)
        return found

    def _read(self, name: str, columns: Sequence[str] | None) -> pa.Table | None:
        """A file of rollouts; None if it is damaged or has just been removed."""
        try:
            file = pq.ParquetFile(self.path / name)
            names = file.schema_arrow.names
            wanted = None if columns is None else [n for n in names if n in columns or n.startswith((REWARD, SECONDS))]
            return file.read(columns=wanted, use_threads=False)
        except (OSError, pa.ArrowException):
            return None

    def _summary(self, name: str) -> pa.Table | None:
        table = self._read(name, (*_INDEXED, "phase"))
        if table is None or not set(_INDEXED) <= set(table.column_names):
            return None
        calls = table["tool_calls"].to_pylist()
        tools = pa.array(["\n".join(sorted({call["name"] for call in of_row or ()})) for of_row in calls], pa.string())
        columns = {n: table[n] for n in table.column_names if n not in ("prompt", "completion", "tool_calls")}
        for text in ("prompt", "completion"):
            columns[text] = pc.utf8_slice_codeunits(table[text], 0, HEAD_CHARS)
        if "phase" not in columns:  # a file of an earlier release
            columns["phase"] = pa.array([TRAINING] * table.num_rows, pa.string())
        return pa.table({**columns, "tools": tools})

    def _matching(self, text: str, table: pa.Table) -> pa.Array:
        """(rows of the index,) true where prompt or completion contains a text, by the rule of `rows_with`."""
        found = self._matches.get(text)
        if found is not None and found[0] == table.num_rows:
            return found[1]
        with self._lock:
            names = sorted(self._parts)
        with ThreadPoolExecutor(4) as threads:
            masks = list(threads.map(lambda name: self._mask(name, text), names))
        mask = pa.concat_arrays(masks) if masks else pa.array([], pa.bool_())
        if len(mask) != table.num_rows:  # files have come or gone meanwhile
            mask = pa.array([False] * table.num_rows)
        self._matches = {**dict(list(self._matches.items())[-8:]), text: (table.num_rows, mask)}
        return mask

    def _mask(self, name: str, text: str) -> pa.Array:
        count = self._parts[name][1].num_rows
        wanted = ("prompt", "completion", "is_messages")
        table = self._read(name, wanted)
        if table is None or table.num_rows != count:
            return pa.array([False] * count)
        prompts, completions, is_messages = (table[column].combine_chunks() for column in wanted)
        return rows_with(text, (prompts, completions), is_messages)


def _is_alive(start: dict[str, Any]) -> bool:
    """True if the process that wrote the event of a start still runs; another process may have its number by now."""
    try:
        created = psutil.Process(start["pid"]).create_time()
    except psutil.Error:
        return False
    start_time = start.get("process_started")
    return not isinstance(start_time, (int, float)) or abs(created - start_time) < SAME_START_S


def with_words(row: dict[str, Any]) -> dict[str, Any]:
    """A whole row for a page without a server: with what the list shows of a conversation (`head`), and what a search
    reads of it (`words`)."""
    if not row["is_messages"]:
        return row
    return {**row, "head": _head(row), "words": [words(row["prompt"]), words(row["completion"])]}


def _head(row: dict[str, Any]) -> dict[str, str]:
    return {
        "prompt": _said(row["prompt"], "user", last_alone=True)[:HEAD_CHARS],
        "completion": _said(row["completion"], "assistant", last_alone=False)[:HEAD_CHARS],
    }


def _said(text: str, role: str, *, last_alone: bool) -> str:
    """Joins the texts of the messages with this role, or of all messages if none has it; other texts are returned."""
    try:
        messages = json.loads(text)
        chosen = [message for message in messages if message["role"] == role] or messages
        return " ".join(filter(None, map(_content, chosen[-1:] if last_alone else chosen)))
    except (ValueError, TypeError, KeyError, AttributeError):  # a user's function may return any messages
        return text


def _content(message: dict[str, Any]) -> str:
    """The text of a message, its other blocks by their types, and the names of the tools that it calls."""
    content = message.get("content") or []
    if isinstance(content, str):
        content = [{"text": content}]
    blocks = [block.get("text") or f"[{block.get('type', 'block')}]" for block in content]
    calls = [f"→ {call.get('function', call).get('name')}" for call in message.get("tool_calls") or ()]
    return " ".join(filter(None, [*blocks, *calls]))


def _facets(table: pa.Table) -> dict[str, list[Any]]:
    if not table.num_rows:
        return {name: [] for name in ("finish_reasons", "tools", "rewards", "seconds", "phases", "steps")}
    tools = {tool for names in pc.unique(table["tools"]).to_pylist() for tool in (names or "").split("\n") if tool}
    steps = pc.min_max(table["step"]).as_py()
    return {
        "finish_reasons": sorted(filter(None, pc.unique(table["finish_reason"]).to_pylist())),
        "tools": sorted(tools),
        "rewards": [name.removeprefix(REWARD) for name in table.column_names if name.startswith(REWARD)],
        "seconds": [name.removeprefix(SECONDS) for name in table.column_names if name.startswith(SECONDS)],
        "phases": sorted(pc.unique(table["phase"]).to_pylist(), key=lambda phase: (phase != TRAINING, phase)),
        "steps": [steps["min"], steps["max"]],
    }
