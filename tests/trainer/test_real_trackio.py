"""A run's traces in the real Trackio, where it is installed: `pip install "groupgrad[trackio]"` (0.43 was run)."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from groupgrad.run_folder.run_files import read_lines


def test_each_rollout_and_event_is_a_trace_in_its_database(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # is read at the import
    pytest.importorskip("trackio")
    names = {"report_to": "trackio", "project": "squares", "run_name": "first", "trackio_static_space_id": False}
    train(max_steps=4, record_traces=True, **names)
    with sqlite3.connect(tmp_path / "trackio" / "squares.db") as database:
        found = Counter(name for (name,) in database.execute("SELECT key FROM traces"))
    rows = pq.read_table(tmp_path / "run" / "rollouts").num_rows
    events = [line for line in read_lines(tmp_path / "run" / "events.jsonl") if line["event"] != "ended"]
    assert rows == 32 and found == {"rollouts": rows, "event": len(events)}
