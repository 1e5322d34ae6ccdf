"""Names in a run folder, its files of JSON lines, and writes on a thread; see docs/run-folder.md."""

from __future__ import annotations

import contextvars
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from groupgrad.concurrency.daemon_threads import DedicatedThread

METRICS, EVENTS, CONFIG = "metrics.jsonl", "events.jsonl", "run_config.json"
WEIGHTS = "weights.jsonl"
"""File of one digest of the trained weights for each step."""
ROLLOUTS = "rollouts"
"""Folder of one parquet file for each step and rank."""
EVAL_ROLLOUTS = "eval_rollouts"
"""Folder of the same files for evaluations, in a folder for each prefix of metrics."""
IMAGES = "rollout_images"
"""Folder of the images of rollouts, by hash."""
LOCK_OWNER = ".groupgrad.lock.json"
"""File with host, process and start time of the run or sweep that trains in the folder."""
PREVIOUS = "previous_run"
"""Folder that receives the files of an earlier run when a new one starts in the same folder."""

_ROLLOUT_FILE = re.compile(r"step_(\d+)\.(\d+)\.parquet")


def rollout_file(step: int, rank: int) -> str:
    """Name of the file of a step's rollouts on a rank."""
    return f"step_{step:06d}.{rank}.parquet"


def parse_rollout_file(name: str) -> tuple[int, int] | None:
    """Step and rank of a file of rollouts; None for another name."""
    match = _ROLLOUT_FILE.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def finite(value: Any) -> Any:
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of standard JSON; numbers that are not finite become null."""
    return (json.dumps(finite(record), ensure_ascii=False, default=str) + "\n").encode("utf-8", errors="replace")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines, without torn lines; none if there is no file."""
    try:
        data = path.read_bytes()
    except OSError:
        return
    yield from parse_lines(data)


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The records of JSON lines, without lines that are torn or still being written."""
    return [record for line in data.splitlines(keepends=True) if (record := _parse_line(line)) is not None]


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for one that is torn or still being written."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file aside and renames it, so that readers find the whole of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(aside)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


class LineFile:
    """A file of JSON lines that is appended to, each line by one write. Several threads may append."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a record. OSError if it cannot be written; a part of it is then no line."""
        line = json_line(record)
        with self._lock:
            if not _ends_with_newline(self.path):
                line = b"\n" + line
            with self.path.open("ab", buffering=0) as file:
                if file.write(line) != len(line):
                    raise OSError(f"{self.path}: the disk took a part of a line")

    def cut(self, step: int) -> None:
        """Removes the lines of later steps than `step`, by a new file in the place of the old one."""
        if not self.path.exists():
            return
        kept = b"".join(json_line(record) for record in read_lines(self.path) if not _is_later(record, step))
        replace_file(self.path, lambda aside: aside.write_bytes(kept))


class WriteBehind:
    """Runs jobs one after another on a daemon thread, so that a slow disk does not hold up training.

    Where `capacity` jobs wait, further ones are dropped. `on_error` gets what a job raises, on that thread.
    """

    def __init__(self, on_error: Callable[[Exception], object], *, capacity: int = 8):
        self._on_error = on_error
        self._thread = DedicatedThread("groupgrad-run-folder")
        self._capacity, self._num_waiting = capacity, 0
        self._lock = threading.Lock()
        self._last: Future[None] | None = None
        self.num_dropped = 0

    def put(self, job: Callable[[], object]) -> bool:
        """Queues `job`; False if it is dropped because the disk is too slow."""
        context = contextvars.copy_context()  # a tracker's run is one of its variables
        with self._lock:
            if self._num_waiting >= self._capacity:
                self.num_dropped += 1
                return False
            self._num_waiting += 1
            self._last = self._thread.submit(context.run, self._run, job)
        return True

    def drain(self, timeout_s: float) -> bool:
        """Waits until all jobs are done; False if they are not after `timeout_s`."""
        return self._last is None or bool(wait([self._last], timeout_s).done)

    def close(self, timeout_s: float) -> bool:
        """Does what is waiting and ends the thread; False if that takes longer than `timeout_s`."""
        done = self.drain(timeout_s)
        self._thread = DedicatedThread("groupgrad-run-folder")  # the thread of one that is dropped ends
        return done

    def _run(self, job: Callable[[], object]) -> None:
        with self._lock:
            self._num_waiting -= 1
        try:
            job()
        except Exception as error:  # a record that is lost must not end a run
            self._on_error(error)


def _is_later(record: Mapping[str, Any], step: int) -> bool:
    record_step = record.get("step", 0)
    return isinstance(record_step, (int, float)) and record_step > step


def set_aside(folder: Path) -> bool:
    """Moves the files of an earlier run to `previous_run/`, or to `previous_run_2/` and so on.

    False if there are none.
    """
    names = (METRICS, EVENTS, CONFIG, WEIGHTS, ROLLOUTS, EVAL_ROLLOUTS, IMAGES)
    found = [folder / name for name in names if (folder / name).exists()]
    if not found:
        return False
    previous, number = folder / PREVIOUS, 1
    while os.path.lexists(previous):
        number += 1
        previous = folder / f"{PREVIOUS}_{number}"
    previous.mkdir(parents=True)
    for path in found:
        os.replace(path, previous / path.name)
    return True


def remove_rollouts_after(folder: Path, step: int) -> None:
    """Removes the files of rollouts of later steps than `step` from a run's folder, of all ranks.

    Files that an ended process left aside are removed too.
    """
    for path in [*folder.glob(f"{ROLLOUTS}/*"), *folder.glob(f"{EVAL_ROLLOUTS}/*/*")]:
        place = parse_rollout_file(path.name)
        if path.name.endswith(".tmp") or (place is not None and place[0] > step):
            path.unlink(missing_ok=True)


def _ends_with_newline(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    return True
