"""A full disk costs a checkpoint or a log, not the run and not the checkpoints before."""

from __future__ import annotations

import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback
from watching import Watch, names

from groupgrad.checkpoints.choosing import choose
from groupgrad.checkpoints.saving import UNFINISHED
from groupgrad.errors import CheckpointNotSaved


@pytest.mark.fault(
    "there is too little space for a checkpoint, which is checked before anything is written",
    "an error in the log names folder and bytes, older checkpoints stay, training goes on, and a later save succeeds",
    "that checkpoint",
)
def test_too_little_space_is_found_before_writing(new_trainer, straight, weights_of, tmp_path, caplog, monkeypatch):
    trainer, written = new_trainer(tmp_path), []
    free = {2: 1000}
    plain = shutil.disk_usage
    space = lambda path: SimpleNamespace(free=free.get(trainer.state.global_step, plain(path).free))  # noqa: E731
    monkeypatch.setattr("groupgrad.checkpoints.saving.shutil.disk_usage", space)
    save_model = trainer.save_model
    monkeypatch.setattr(
        trainer, "save_model", lambda *a, **k: (written.append(trainer.state.global_step), save_model(*a, **k))
    )
    trainer.train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert written == [1, 3]
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint-1").iterdir() if path.name != "manifest.json")
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert f"checkpoint-2 takes about {size:,} bytes and {tmp_path} has 1,000 free; free space there" in message
    assert torch.equal(weights_of(trainer), weights_of(straight[1]))


@pytest.mark.parametrize("limit", [100, 60_000, 150_000])
@pytest.mark.fault(
    "the disk is full in the middle of a save",
    "the half folder is removed, older checkpoints stay, training goes on, and a later save succeeds",
    "that checkpoint",
)
def test_a_write_that_fails_leaves_nothing_behind(new_trainer, straight, tmp_path, caplog, limit):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def fill(step: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit if step == 2 else hard, hard))

    trainer = new_trainer(tmp_path)
    trainer.add_callback(Watch(tmp_path, fill))
    try:
        trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert not (tmp_path / UNFINISHED).exists()
    assert "checkpoint-2 could not be written (" in caplog.text and "bytes free" in caplog.text
    assert choose(tmp_path, True).damage == {}


@pytest.mark.fault(
    "the disk is full at the last save of a run",
    "all steps are made, then train() raises CheckpointNotSaved, and `groupgrad train` exits with 73",
    "nothing in memory; the steps since the last checkpoint if the process ends",
)
def test_a_run_whose_last_save_fails_says_so(new_trainer, straight, weights_of, tmp_path, monkeypatch):
    trainer = new_trainer(tmp_path)

    def fill(step: int) -> None:
        if step > 1:
            monkeypatch.setattr("groupgrad.checkpoints.saving.shutil.disk_usage", lambda _: SimpleNamespace(free=7))

    trainer.add_callback(Watch(tmp_path, fill))
    with pytest.raises(
        CheckpointNotSaved, match=r"has 7 free;.*; all 3 steps were made, and the weights are in memory"
    ):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]
    assert torch.equal(weights_of(trainer), weights_of(straight[1]))


@pytest.mark.fault(
    "a log or a file of completions cannot be written",
    "a warning names it, and training goes on",
    "that log",
)
def test_a_log_that_cannot_be_written_is_a_warning(new_trainer, straight, weights_of, tmp_path, caplog):
    class Full(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            raise OSError(28, "No space left on device")

    trainer = new_trainer(tmp_path, save_strategy="no", log_completions=True, num_completions_to_print=0)
    trainer.add_callback(Full())
    (tmp_path / "completions").write_text("a file where the folder would be")
    trainer.train()
    assert f"step 1: completions in {tmp_path / 'completions'} could not be written" in caplog.text
    assert "step 2: a log could not be written ([Errno 28] No space left on device)" in caplog.text
    assert torch.equal(weights_of(trainer), weights_of(straight[1]))


@pytest.mark.fault(
    "saving raises an error that is not the disk's",
    "the run ends with that error; older checkpoints stay, nothing half-written is left",
    "the steps since the last checkpoint",
)
def test_an_error_of_another_kind_ends_the_run(new_trainer, tmp_path, monkeypatch):
    trainer = new_trainer(tmp_path)
    monkeypatch.setattr(trainer, "_save_scaler", lambda _: 1 / (trainer.state.global_step - 2))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]
    assert not (tmp_path / UNFINISHED).exists()
