"""With save_in_background a checkpoint is that of its step, whatever training does while its files are written."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from watching import Watch, names

from groupgrad.checkpoints import host_copies, saving
from groupgrad.checkpoints.choosing import choose
from groupgrad.checkpoints.saving import UNFINISHED
from groupgrad.errors import CheckpointNotSaved
from groupgrad.stopping import EXIT_STOPPED, Stopped
from groupgrad.trainer import saves

TIMED = ("manifest.json", "trainer_state.json", "training_args.bin")
"""Files that name the run's folder or measured times."""


@pytest.fixture(autouse=True)
def all_files_are_large(monkeypatch):
    monkeypatch.setattr(host_copies, "LARGE_BYTES", 1)


class Gate:
    """Holds the thread that saves before each file, until `open()` or for `seconds`."""

    def __init__(self, monkeypatch, seconds: float = 30.0):
        self._event, self._seconds, self._save = threading.Event(), seconds, torch.save
        self.written_behind: list[str] = []
        monkeypatch.setattr(torch, "save", self._gated)

    def open(self) -> None:
        self._event.set()

    def _gated(self, value, path, *args, **kwargs):
        if threading.current_thread().name == "groupgrad-save":
            self._event.wait(self._seconds)
            self.written_behind.append(Path(path).name)
        self._save(value, path, *args, **kwargs)


def _noted(steps: list[int], begin):
    """`saving.save_behind` that notes the step of each call."""

    def noted(folder, step, *args, **kwargs):
        steps.append(step)
        return begin(folder, step, *args, **kwargs)

    return noted


def contents(checkpoint: Path, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name not in without}


def test_training_goes_on_while_a_file_is_written(new_trainer, straight, weights_of, tmp_path, monkeypatch):
    """The second step ends before the first checkpoint is there; callbacks hear of each when it is."""
    gate, seen = Gate(monkeypatch), []

    def step_end(step: int) -> None:
        seen.append(names(tmp_path))
        if step == 2:
            gate.open()

    trainer, watch = new_trainer(tmp_path, save_in_background=True), Watch(tmp_path, step_end)
    trainer.add_callback(watch)
    trainer.train()
    assert seen[:2] == [[], []]
    assert set(gate.written_behind) == {"optimizer.pt", "rng_state.pth", "groupgrad_state_0.pt"}
    assert watch.saved == [1, 2, 3]
    for step in (1, 2, 3):
        first, second = straight[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}"
        assert contents(first, TIMED) == contents(second, TIMED)
        assert choose(tmp_path, str(second)).damage == {}
    assert torch.equal(weights_of(trainer), weights_of(straight[1]))
    assert not (tmp_path / UNFINISHED).exists()
    assert "groupgrad-save" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("kind", ["plain", "reference", "lora"])
def test_the_files_are_those_of_a_save_that_training_waits_for(new_trainer, tmp_path, monkeypatch, kind):
    """Byte for byte, the manifest too, though everything changes while they are written."""
    from peft import LoraConfig

    settings = {"reference": {"beta": 0.1, "sync_ref_model": True}}.get(kind, {})
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if kind == "lora" else None
    trainer = new_trainer(tmp_path / "run", max_steps=2, save_strategy="no", peft=peft, **settings)
    trainer.train()
    first, second = tmp_path / "first", tmp_path / "second"
    saving.save(first, 2, trainer.saves._parts(first), trainer.saves._description)
    gate = Gate(monkeypatch)
    under_way = saving.save_behind(second, 2, trainer.saves._parts(second), trainer.saves._description, lambda: 2**30)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
        for state in trainer.optimizer.state.values():
            for value in state.values():
                value.zero_()
    trainer.state.global_step = 7
    torch.manual_seed(3)
    gate.open()
    assert under_way.finish() == second / "checkpoint-2"
    assert contents(first / "checkpoint-2") == contents(second / "checkpoint-2")


@pytest.mark.fault(
    "a signal comes while a checkpoint is written behind training",
    "the run stops after that checkpoint and one of the last step, and continues bit for bit",
    "nothing",
)
def test_a_signal_waits_for_what_is_written(new_trainer, straight, weights_of, tmp_path, monkeypatch):
    Gate(monkeypatch, seconds=0.1)
    trainer = new_trainer(tmp_path, save_in_background=True)
    stop = lambda step: step == 2 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    trainer.add_callback(Watch(tmp_path, stop))
    saved: list[int] = []
    monkeypatch.setattr(saves.saving, "save_behind", _noted(saved, saves.saving.save_behind))
    with pytest.raises(Stopped) as stopped:
        trainer.train()
    assert stopped.value.code == EXIT_STOPPED
    assert saved == [1]  # the last checkpoint has been written when the end names it
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    resumed = new_trainer(tmp_path, save_in_background=True)
    resumed.train(resume_from_checkpoint="auto")
    assert torch.equal(weights_of(resumed), weights_of(straight[1]))


@pytest.mark.fault(
    "an error ends a run while a checkpoint is written behind training",
    "the checkpoint is finished before the error leaves train()",
    "the steps since that checkpoint",
)
def test_an_error_waits_for_what_is_written(new_trainer, tmp_path, monkeypatch):
    Gate(monkeypatch, seconds=0.1)
    trainer = new_trainer(tmp_path, save_in_background=True)
    trainer.add_callback(Watch(tmp_path, lambda step: 1 / (2 - step)))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]
    assert choose(tmp_path, True).damage == {}


@pytest.mark.parametrize("full_at", [2, 3])
@pytest.mark.fault(
    "the disk is full while a checkpoint is written behind training",
    "the half folder is removed, older checkpoints stay, training goes on, and a later save succeeds; after the last "
    "step train() raises CheckpointNotSaved",
    "that checkpoint",
)
def test_a_full_disk_behind_training(new_trainer, straight, weights_of, tmp_path, caplog, full_from, full_at):
    trainer = new_trainer(tmp_path, save_in_background=True)

    def fill(step: int) -> None:
        trainer.saves.finish()
        full_from(60_000 if step == full_at else None)

    watch = Watch(tmp_path, fill)
    trainer.add_callback(watch)
    error = pytest.raises(CheckpointNotSaved, match=r"checkpoint-3 could not be written .* all 3 steps were made")
    with error if full_at == 3 else nullcontext():
        trainer.train()
    full_from(None)
    left = [step for step in (1, 2, 3) if step != full_at]
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]
    assert watch.saved == left
    assert f"checkpoint-{full_at} could not be written (" in caplog.text and "bytes free" in caplog.text
    assert not (tmp_path / UNFINISHED).exists()
    assert torch.equal(weights_of(trainer), weights_of(straight[1]))


def test_an_error_of_another_kind_ends_the_run(new_trainer, tmp_path, monkeypatch):
    trainer, finish = new_trainer(tmp_path, save_in_background=True), saving._finish
    fail_at_2 = lambda folder, place, manifest: finish(folder, place, manifest) if manifest.step != 2 else 1 / 0  # noqa: E731
    monkeypatch.setattr(saving, "_finish", fail_at_2)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]
    assert not (tmp_path / UNFINISHED).exists()


@pytest.mark.fault(
    "memory is short for the copy that save_in_background needs",
    "training waits for the file to be written, and one line says so",
    "nothing but time",
)
def test_short_memory_has_training_wait(new_trainer, tmp_path, monkeypatch, caplog):
    gate = Gate(monkeypatch, seconds=0)
    host_copies._warn_of_short_memory.cache_clear()
    monkeypatch.setattr(saves, "free_bytes", lambda device: 100_000)
    new_trainer(tmp_path, save_in_background=True, max_steps=2).train()
    (line,) = [r.getMessage() for r in caplog.records if "save_in_background" in r.getMessage()]
    assert "would take more than half of the free memory" in line and "training waits for this file" in line
    assert "optimizer.pt" not in gate.written_behind
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_rotation_and_the_best_follow_the_rename(new_trainer, tmp_path, monkeypatch):
    """Only the newest and the best are left, and no time has one been removed before another was there."""
    Gate(monkeypatch, seconds=0.05)
    trainer, counts = new_trainer(tmp_path, save_in_background=True, save_total_limit=1, max_steps=4), []
    trainer.add_callback(Watch(tmp_path, lambda step: counts.append(len(names(tmp_path)))))
    trainer.train()
    assert names(tmp_path) == ["checkpoint-4"]
    assert counts[0] == 0 and set(counts[2:]) <= {1, 2}


def test_tensors_that_share_memory_share_it_in_the_copy():
    whole = torch.arange(4.0)
    copied = host_copies.on_host({"whole": whole, "part": whole[1:], "again": whole, "list": [whole[:2]]})
    whole.zero_()
    assert copied["whole"] is copied["again"]
    assert copied["part"].tolist() == [1, 2, 3]
    assert copied["part"].untyped_storage().data_ptr() == copied["whole"].untyped_storage().data_ptr()
