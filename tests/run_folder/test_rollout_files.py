"""The space that the rollouts of a run get."""

from __future__ import annotations

import random

import numpy as np
import pyarrow.parquet as pq
import pytest
from synthetic_run import _rows

from groupgrad.run_folder.rollout_files import RolloutFiles
from groupgrad.run_folder.run_files import parse_rollout_file


@pytest.mark.parametrize("every", [1, 4])
def test_space_for_fewer_groups_than_steps_lasts_to_the_end_of_the_run(tmp_path, every):
    """Also where a generation batch serves several steps. 240 files would be written, and 40 of them fit."""
    generator, numbers = random.Random(0), np.random.default_rng(0)
    part = _rows(0.5, 8, 20, generator, numbers, hostile=False)
    RolloutFiles(tmp_path / "one", rank=0, keep_bytes=10**9, seed=0).write(1, [part], max_steps=1)
    (one,) = (tmp_path / "one").iterdir()
    files = RolloutFiles(tmp_path / "run", rank=0, keep_bytes=40 * one.stat().st_size, seed=0)
    for step in range(1, 240 * every + 1, every):
        files.write(step, [part], max_steps=240 * every)
    steps = [parse_rollout_file(path.name)[0] for path in (tmp_path / "run").iterdir()]
    of_quarters = np.histogram(steps, bins=4, range=(0, 240 * every))[0]
    assert 30 <= sum(of_quarters) <= 40 and min(of_quarters) >= 5, of_quarters


def test_groups_of_a_first_step_that_does_not_fit_are_stored(tmp_path):
    part = _rows(0.5, 128, 20, random.Random(0), np.random.default_rng(0), hostile=False)
    RolloutFiles(tmp_path / "all", rank=0, keep_bytes=10**9, seed=0).write(1, [part], max_steps=1)
    (whole,) = (tmp_path / "all").iterdir()
    said: list[str] = []
    keep = whole.stat().st_size // 2
    RolloutFiles(tmp_path / "run", rank=0, keep_bytes=keep, seed=0, on_thin=said.append).write(1, [part], max_steps=1)
    (path,) = (tmp_path / "run").iterdir()
    rows = pq.read_table(path, columns=["row", "group"]).to_pydict()
    groups = set(rows["group"])
    assert path.stat().st_size <= keep and 1 <= len(groups) < 16 and len(rows["row"]) == 8 * len(groups)
    assert len(said) == 1
