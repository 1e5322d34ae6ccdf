"""A damaged file of a checkpoint is named, and never trained from in silence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from groupgrad.checkpoints.choosing import choose
from groupgrad.errors import CheckpointError


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


DAMAGES: list[Callable[[Path], None]] = [delete, empty, halve, flip_a_bit]


@pytest.fixture
def copied(straight, tmp_path) -> Path:
    """A run folder with copies of the first two checkpoints."""
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(straight[0] / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_file(copied, caplog, damage):
    run_folder = copied
    broken, tried, named = run_folder / "checkpoint-2", 0, 0
    for path in sorted(broken.rglob("*")):
        kept = path.read_bytes()
        damage(path)
        caplog.clear()
        if (damage, path.name) == (delete, "manifest.json"):
            # Without its manifest it is a checkpoint like those of transformers, whose files are all intact.
            assert choose(run_folder, str(broken)).manifest is None
            assert "has no manifest.json" in caplog.text
        else:
            with pytest.raises(CheckpointError, match=f"{path.name}.*is damaged|is damaged: {path.name}"):
                choose(run_folder, str(broken))
            assert choose(run_folder, True).folder.name == "checkpoint-1"
            assert "skipped checkpoint-2: " in caplog.text and path.name in caplog.text
            named += 1
        path.write_bytes(kept)
        tried += 1
    assert tried >= 12
    print(f"{damage.__name__}: {tried} files tried, {named} named, {tried - named} with a remark, 0 silent")
    assert choose(run_folder, str(broken)).damage == {}


def test_a_run_goes_round_a_damaged_checkpoint(copied, straight, new_trainer, weights_of, caplog):
    flip_a_bit(copied / "checkpoint-2" / "model.safetensors")
    resumed = new_trainer(copied)
    resumed.train(resume_from_checkpoint=True)
    assert "skipped checkpoint-2: model.safetensors has other content" in caplog.text
    assert torch.equal(weights_of(resumed), weights_of(straight[1]))
    assert choose(copied, str(copied / "checkpoint-2")).damage == {}
