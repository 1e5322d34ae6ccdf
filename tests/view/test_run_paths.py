"""The runs and sweeps that `groupgrad view` finds at the paths it is given."""

from __future__ import annotations

import pytest
from synthetic_run import write_run

from groupgrad.apps.cli.view import RunPaths
from groupgrad.apps.runs.run_folder import NoRun
from groupgrad.apps.sweep.store import Store


def names(*paths) -> list[str]:
    return [run.name for run in RunPaths([str(path) for path in paths]).runs()]


def test_a_folder_of_runs_has_the_arms_of_its_sweeps(tmp_path):
    write_run(tmp_path / "runs" / "single", steps=1, rows=8)
    for arm in ("01-a", "02-b"):
        write_run(tmp_path / "runs" / "swept" / "arms" / arm, steps=1, rows=8)
    Store(tmp_path / "runs" / "swept", create=True)
    assert names(tmp_path / "runs") == ["single", "01-a", "02-b"]
    assert names(tmp_path / "runs" / "swept") == ["01-a", "02-b"]
    assert RunPaths([str(tmp_path / "runs")]).sweeps == [tmp_path / "runs" / "swept"]


def test_a_run_that_is_named_twice_is_shown_once(tmp_path, monkeypatch):
    for name in ("runs/first", "runs/second", "other/first"):
        write_run(tmp_path / name, steps=1, rows=8)
    Store(tmp_path / "runs" / "swept", create=True)
    monkeypatch.chdir(tmp_path)
    assert names("runs", "runs/first") == ["first", "second"]
    assert names("runs/first", tmp_path / "runs" / "first", "runs/../runs/first/") == ["first"]
    assert names("runs", "other") == ["runs/first", "second", "other/first"]  # other runs of the same name
    assert len(RunPaths(["runs", "runs/swept"]).sweeps) == 1


def test_runs_that_begin_later_are_found(tmp_path):
    Store(tmp_path / "swept", create=True)
    paths = RunPaths([str(tmp_path / "swept")])  # no arm has begun
    assert paths.runs() == []
    write_run(tmp_path / "swept" / "arms" / "02-b", steps=1, rows=8)
    (second,) = paths.runs()
    write_run(tmp_path / "swept" / "arms" / "01-a", steps=1, rows=8)
    assert [run.name for run in paths.runs()] == ["02-b", "01-a"]  # the place of a run stays
    assert paths.runs()[0] is second


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_path_without_a_run_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoRun, match=f"{name}.*holds no run"):
        RunPaths([str(tmp_path / name)])
