"""Reads files of a run that grow meanwhile: from a position on, or their last line."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from groupgrad.run_folder.run_files import EVENTS, METRICS, ROLLOUTS, WEIGHTS, parse_lines, parse_rollout_file

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
