"""The images of rollouts in the run folder: which prompt they belong to, and how often each is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from groupgrad.data.images import digest
from groupgrad.run_folder.rollout_files import RolloutFiles
from groupgrad.run_folder.rollout_table import StoredRows, to_table
from groupgrad.types import Media, Prompt, Rollout

RED, BLUE, GREEN = (Image.new("RGB", (8, 6), color) for color in ("red", "blue", "green"))


def media(*images: Image.Image) -> Media:
    return Media(images, {}, {}, digest(images))


def rows_of(*images_of_rows: tuple[Image.Image, ...] | None, prompt_image: Image.Image = RED) -> StoredRows:
    """A group whose prompt shows `prompt_image`; a row has images of its own where its tools have returned some."""
    prompt = Prompt([1], {"prompt": "look"}, 0, media(prompt_image))
    rollouts = [
        Rollout(prompt, row, [5], "eos", "a", "a", media=None if images is None else media(*images))
        for row, images in enumerate(images_of_rows)
    ]
    count = len(rollouts)
    return StoredRows(
        rollouts=rollouts,
        ids=np.full(count, 5),
        offsets=np.arange(count + 1),
        texts=["a"] * count,
        advantages=[0.0] * count,
        reward_names=["r"],
        rewards=[[1.0]] * count,
        combined=[1.0] * count,
        num_generations=count,
    )


def test_rows_whose_tools_return_images_keep_the_id_of_their_prompt():
    table = to_table(1, rows_of(None, (RED, BLUE), (RED, GREEN, BLUE))).to_pydict()
    assert len(set(table["prompt_id"])) == 1
    first, second, third = table["images"]
    assert second == [*first, third[2]] and third[:1] == first and len({*second, *third}) == 3
    assert table["prompt_images"] == [1, 1, 1]


def test_another_image_makes_another_prompt():
    ids = [to_table(1, rows_of(None, prompt_image=image))["prompt_id"].to_pylist() for image in (RED, RED, BLUE)]
    assert ids[0] == ids[1] != ids[2]


def test_each_image_is_written_once(tmp_path: Path):
    files = RolloutFiles(tmp_path / "rollouts", rank=0, keep_bytes=10**6, seed=0)
    for step in (1, 2):
        files.write(step, [rows_of(None, (RED, BLUE), (RED, GREEN), (RED, BLUE))], max_steps=2)
    stored = {path.stem for path in (tmp_path / "rollout_images").iterdir()}
    named = {name for row in pq.read_table(tmp_path / "rollouts").to_pylist() for name in row["images"]}
    assert stored == named and len(stored) == 3
