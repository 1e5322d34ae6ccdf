"""A full disk costs a checkpoint or a log, not the run and not the checkpoints before."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback
from watching import Watch, names

from groupgrad.checkpoints.choosing import choose
from groupgrad.checkpoints.saving import UNFINISHED
from groupgrad.errors import CheckpointNotSaved


@pytest.mark.parametrize("limit", [100, 60_000, 150_000])
def test_a_write_that_fails_leaves_nothing_behind(
    new_trainer, straight, weights_of, tmp_path, caplog, full_from, limit
):
    trainer = new_trainer(tmp_path)
    trainer.add_callback(Watch(tmp_path, lambda step: full_from(limit if step == 2 else None)))
    trainer.train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert not (tmp_path / UNFINISHED).exists()
    assert "checkpoint-2 could not be written (" in caplog.text and "bytes free. Free space there" in caplog.text
    assert torch.equal(weights_of(trainer), weights_of(straight[1]))
    assert choose(tmp_path, True).damage == {}


def test_a_run_whose_last_save_fails_says_so(new_trainer, straight, weights_of, tmp_path, full_from):
    trainer = new_trainer(tmp_path)
    trainer.add_callback(Watch(tmp_path, lambda step: full_from(60_000) if step == 3 else None))
    with pytest.raises(
        CheckpointNotSaved, match=r"checkpoint-3 could not .*; all 3 steps were made, and the weights are in memory"
    ):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert torch.equal(weights_of(trainer), weights_of(straight[1]))


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


def test_an_error_of_another_kind_ends_the_run(new_trainer, tmp_path, monkeypatch):
    trainer = new_trainer(tmp_path)
    monkeypatch.setattr(trainer, "_save_scaler", lambda _: 1 / (trainer.state.global_step - 2))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]
    assert not (tmp_path / UNFINISHED).exists()
