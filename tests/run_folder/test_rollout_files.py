"""The files of a run's rollouts: the space that they get, and the images of rows and prompts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from synthetic_run import _rows

from groupgrad.data.images import digest
from groupgrad.run_folder.rollout_files import RolloutFiles
from groupgrad.run_folder.rollout_table import StoredRows, images_by_name, to_table
from groupgrad.run_folder.run_files import parse_rollout_file
from groupgrad.types import Branch, Media, Prompt

RED, BLUE, GREEN = (Image.new("RGB", (8, 6), color) for color in ("red", "blue", "green"))


def invented(rows: int) -> StoredRows:
    return _rows(0.5, rows, 60, random.Random(0), np.random.default_rng(0), hostile=False)


def size_of(folder: Path, table: pa.Table) -> int:
    """Bytes of the file of a table."""
    RolloutFiles(folder, rank=0, keep_bytes=10**9, seed=0).write(1, [table], max_steps=1)
    (path,) = folder.iterdir()
    return path.stat().st_size


@pytest.mark.parametrize("every", [1, 4])
def test_space_for_fewer_groups_than_steps_lasts_to_the_end_of_the_run(tmp_path, every):
    """Also where a generation batch serves several steps. 240 files would be written, and 40 of them fit."""
    table = to_table(1, invented(8))
    files = RolloutFiles(tmp_path / "run", rank=0, keep_bytes=40 * size_of(tmp_path / "one", table), seed=0)
    for step in range(1, 240 * every + 1, every):
        files.write(step, [table], max_steps=240 * every)
    steps = [parse_rollout_file(path.name)[0] for path in (tmp_path / "run").iterdir()]
    of_quarters = np.histogram(steps, bins=4, range=(0, 240 * every))[0]
    assert 30 <= sum(of_quarters) <= 40 and min(of_quarters) >= 5, of_quarters


@pytest.mark.parametrize("num_batches", [1, 2])
def test_groups_of_a_first_step_that_does_not_fit_are_stored(tmp_path, caplog, num_batches):
    """Whole ones, also where the generation batches of a step number their groups alike."""
    tables = [to_table(1, invented(128 // num_batches))] * num_batches
    keep = size_of(tmp_path / "all", pa.concat_tables(tables)) // 2
    RolloutFiles(tmp_path / "run", rank=0, keep_bytes=keep, seed=0).write(1, tables, max_steps=1)
    (path,) = (tmp_path / "run").iterdir()
    groups = pq.read_table(path, columns=["group"])["group"].to_pylist()
    runs = [groups[start : start + 8] for start in range(0, len(groups), 8)]
    assert path.stat().st_size <= keep and 1 <= len(runs) < 16 and all(set(run) == {run[0]} for run in runs)
    assert caplog.text.count("do not fit into rollouts_keep") == 1


def with_images(*images_of_rows: tuple[Image.Image, ...] | None, prompt_image: Image.Image = RED) -> StoredRows:
    """A group whose prompt shows `prompt_image`; a row has images of its own where its tools have returned some."""
    rows = invented(len(images_of_rows))
    prompt = Prompt([1], {"prompt": "look"}, 0, media(prompt_image))
    pairs = zip(rows.rollouts, images_of_rows)
    rollouts = [replace(rollout, prompt=prompt, media=media(*images) if images else None) for rollout, images in pairs]
    return replace(rows, rollouts=rollouts)


def media(*images: Image.Image) -> Media:
    return Media(images, {}, {}, digest(images))


def test_rows_whose_tools_return_images_keep_the_id_of_their_prompt():
    table = to_table(1, with_images(None, (RED, BLUE), (RED, GREEN, BLUE))).to_pydict()
    first, second, third = table["images"]
    assert second == [*first, third[2]] and third[:1] == first and len({*second, *third}) == 3
    assert table["prompt_images"] == [1, 1, 1]
    ids = [set(to_table(1, with_images(None, prompt_image=image))["prompt_id"].to_pylist()) for image in (RED, BLUE)]
    assert {*table["prompt_id"]} == ids[0] != ids[1], "another image makes another prompt"


def test_each_image_is_written_once(tmp_path: Path):
    files = RolloutFiles(tmp_path / "rollouts", rank=0, keep_bytes=10**6, seed=0)
    for step in (1, 2):
        rows = with_images(None, (RED, BLUE), (RED, GREEN), (RED, BLUE))
        table = to_table(step, rows)
        files.write(step, [table], max_steps=2, images=images_by_name(rows, table))
    stored = {path.stem for path in (tmp_path / "rollout_images").iterdir()}
    named = {name for row in pq.read_table(tmp_path / "rollouts").to_pylist() for name in row["images"]}
    assert stored == named and len(stored) == 3


def test_branches_are_stored_with_what_they_continue():
    rows = invented(2)
    first, second = rows.rollouts
    hot = [0.5] * len(second.completion_ids)
    rows.rollouts = [first, replace(second, branches=(Branch(3, (7, 8)), Branch(9, (1,))), temperatures=hot)]
    stored = to_table(1, rows)
    assert stored["branches"].to_pylist() == [[], [{"start": 3, "context": [7, 8]}, {"start": 9, "context": [1]}]]
    assert stored["temperatures"].to_pylist() == [None, hot]
