"""Kills a process at each write, sync and rename of a save; the run then resumes by itself."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from injected_kills import run_and_kill

from groupgrad.checkpoints.choosing import choose
from groupgrad.checkpoints.saving import UNFINISHED, checkpoints_in, sweep


@pytest.fixture(scope="module")
def saver(straight, new_trainer, tmp_path_factory):
    """A trainer after step 2 that keeps one checkpoint. Its folder may be changed."""
    folder, _ = straight
    trainer = new_trainer(tmp_path_factory.mktemp("saver"), max_steps=2, save_strategy="no", save_total_limit=1)
    trainer.train(str(folder / "checkpoint-1"))
    return trainer


def prepare(saver, straight, folder: Path, *names: str) -> None:
    """A run folder with copies of these checkpoints, which `saver` writes to."""
    for name in names:
        shutil.copytree(straight[0] / name, folder / name)
    saver.args.output_dir = str(folder)


def save(saver) -> None:
    saver._save_checkpoint(saver.model, None)


def check(folder: Path) -> str:
    """The name of the checkpoint that a restart takes; all others that it leaves are whole too."""
    sweep(folder)
    assert not (folder / UNFINISHED).exists()
    for path in checkpoints_in(folder):
        assert choose(folder, str(path)).damage == {}
    return choose(folder, True).folder.name


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 32], ids=["each", "some"])
@pytest.mark.parametrize("before", [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"]], ids=["new", "replaced"])
def test_every_change_of_a_save(saver, straight, tmp_path, before, every):
    whole = tmp_path / "whole"
    prepare(saver, straight, whole, *before)
    status, changes = run_and_kill(lambda: save(saver), whole)
    assert (status, check(whole)) == (0, "checkpoint-2")
    assert [path.name for path in checkpoints_in(whole)] == ["checkpoint-2"]
    assert changes > 50
    found: set[str] = set()
    # The last changes are those around the rename.
    for at in sorted({*range(1, changes + 1, every), *range(changes - 5, changes + 1)}):
        folder = tmp_path / str(at)
        prepare(saver, straight, folder, *before)
        status, _ = run_and_kill(lambda: save(saver), folder, at=at)
        assert os.WTERMSIG(status) == signal.SIGKILL
        found.add(check(folder))
        shutil.rmtree(folder)
    assert found == ({"checkpoint-2"} if before[1:] else {"checkpoint-1", "checkpoint-2"})


def test_the_middle_of_every_file(saver, straight, tmp_path):
    sizes = {path.stat().st_size for path in (straight[0] / "checkpoint-2").iterdir()}
    for size in sorted(sizes):
        folder = tmp_path / str(size)
        prepare(saver, straight, folder, "checkpoint-1")
        status, _ = run_and_kill(lambda: save(saver), folder, max_file_bytes=max(1, size // 2))
        assert os.WTERMSIG(status) == signal.SIGXFSZ
        assert check(folder) == "checkpoint-1"


def test_a_run_resumes_by_itself_bit_for_bit(saver, straight, new_trainer, weights_of, tmp_path):
    prepare(saver, straight, tmp_path, "checkpoint-1")

    def killed_before_the_rename() -> None:
        Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        save(saver)

    status, _ = run_and_kill(killed_before_the_rename, tmp_path)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (tmp_path / UNFINISHED / "checkpoint-2" / "manifest.json").is_file()
    resumed = new_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights_of(resumed), weights_of(straight[1]))
    assert not (tmp_path / UNFINISHED).exists()
