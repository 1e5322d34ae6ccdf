"""Files of a run folder: whole lines, and writes behind a run."""

from __future__ import annotations

import threading

import pytest

from groupgrad.apps.runs.run_folder import read_lines_from
from groupgrad.run_folder.run_files import LineFile, WriteBehind, read_lines


def test_torn_lines_are_skipped_and_the_next_line_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    LineFile(path).append({"step": 1, "reward": float("nan"), "text": "é\n"})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert [line["step"] for line in read_lines(path)] == [1]
    again = LineFile(path)
    again.append({"step": 3})
    assert list(read_lines(path)) == [{"step": 1, "reward": None, "text": "é\n"}, {"step": 3}]
    again.cut(1)
    again.append({"step": 2})
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_a_file_that_was_written_anew_is_noticed_whatever_its_length(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path)
    for step in range(1, 5):
        file.append({"step": step, "time": 100 + step})
    found = read_lines_from(path)
    assert found is not None and [line["step"] for line in found[0]] == [1, 2, 3, 4]
    assert read_lines_from(path, found[1]) == ([], found[1])
    file.cut(2)
    for step in range(3, 8):  # longer than it was, with other lines
        file.append({"step": step, "time": 200 + step})
    assert read_lines_from(path, found[1]) is None
    with pytest.raises(ValueError, match="start='x' is no position"):
        read_lines_from(path, "x")


def test_a_slow_disk_drops_records_and_holds_up_nothing():
    gate, started, done, errors = threading.Event(), threading.Event(), [], []
    writer = WriteBehind(errors.append, capacity=2)
    writer.put(lambda: (started.set(), gate.wait()))
    assert started.wait(5)
    accepted = [writer.put(lambda: done.append(1) or 1 / 0) for _ in range(4)]
    assert accepted == [True, True, False, False] and writer.num_dropped == 2
    assert not writer.drain(0.01)
    gate.set()
    assert writer.drain(5.0) and done == [1, 1]
    assert [type(error) for error in errors] == [ZeroDivisionError] * 2
