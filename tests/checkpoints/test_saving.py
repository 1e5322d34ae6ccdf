"""A checkpoint is written aside and renamed; rotation keeps what a run needs; a sweep removes what is ours alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from groupgrad.checkpoints import saving
from groupgrad.checkpoints.manifest import Manifest
from groupgrad.checkpoints.saving import UNFINISHED, SaveFailed, checkpoints_in, rotate, sweep


def write(folder: Path) -> None:
    (folder / "weights").write_text("w")
    (folder / "global_step5").mkdir()
    (folder / "global_step5" / "shard").write_text("s")


def save(folder: Path, step: int, content=write) -> Path:
    return saving.save(folder, step, [content], lambda: {"options": {"beta": 0.1}})


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_in(folder)]


def test_the_manifest_lists_files_of_all_folders(tmp_path):
    manifest = Manifest.read(save(tmp_path, 5))
    assert manifest is not None
    assert (manifest.step, manifest.world_size, manifest.options) == (5, 1, {"beta": 0.1})
    assert {name: entry.size for name, entry in manifest.files.items()} == {"weights": 1, "global_step5/shard": 1}
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_all_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """Files, then the manifest, then folders from the inside out; the run's folder after the rename."""
    synced, fsync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd))
    )
    monkeypatch.setattr(Path, "rename", lambda path, to: (synced.append("rename"), rename(path, to))[1])
    save(tmp_path, 5)
    files = ["shard", "weights", "manifest.json"]
    assert synced == [*files, "global_step5", "checkpoint-5", "rename", tmp_path.name]


def test_a_checkpoint_takes_the_place_of_another(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "checkpoint-is-incomplete.txt").touch()
    folder = save(tmp_path, 5)
    assert sorted(path.name for path in folder.iterdir()) == ["global_step5", "manifest.json", "weights"]


def test_a_write_that_fails_leaves_the_older_one(tmp_path):
    save(tmp_path, 5)

    def full(folder: Path) -> None:
        write(folder)
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    with pytest.raises(SaveFailed, match=r"checkpoint-5 could not be written \(RuntimeError: .*bytes free"):
        save(tmp_path, 5, full)
    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 5, lambda _: 1 / 0)
    assert os.listdir(tmp_path) == ["checkpoint-5"]
    assert Manifest.read(tmp_path / "checkpoint-5") is not None


def test_a_sweep_removes_only_what_is_ours(tmp_path, caplog):
    aside = tmp_path / UNFINISHED
    (aside / "checkpoint-6").mkdir(parents=True)
    (aside / "replaced-checkpoint-5").mkdir()
    (tmp_path / "tmp-checkpoint-7").mkdir()
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "tmp-checkpoint-7"]
    assert f"removed {aside}" in caplog.text
    sweep(tmp_path)
    assert len(caplog.records) == 1


def test_rotation_keeps_the_one_just_written_and_the_best(tmp_path):
    for age, step in enumerate((7, 8, 9, 1, 2, 3)):
        folder = save(tmp_path, step)
        os.utime(folder, (age, age))
    rotate(tmp_path, 3, tmp_path / "checkpoint-3", str(tmp_path / "checkpoint-8"))
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-8"]
    rotate(tmp_path, 1, tmp_path / "checkpoint-3", str(tmp_path / "checkpoint-8"))
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-8"]
    os.utime(tmp_path / "checkpoint-3", (0, 0))
    rotate(tmp_path, 1, tmp_path / "checkpoint-3", None)
    assert names(tmp_path) == ["checkpoint-3"]
    assert not (tmp_path / UNFINISHED).exists()


def test_what_cannot_be_removed_is_a_warning(tmp_path, caplog, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)

    def refuse(path: Path, to: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    rotate(tmp_path, 1, tmp_path / "checkpoint-2", None)
    assert "checkpoint-1 could not be removed ([Errno 13] Permission denied); save_total_limit=1" in caplog.text
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_a_file_system_without_sync(tmp_path, monkeypatch):
    def refuse(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    assert Manifest.read(save(tmp_path, 5)) is not None
