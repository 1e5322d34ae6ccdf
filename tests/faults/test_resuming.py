"""A run resumes from a checkpoint of other options, of another library, or with missing parts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import repeatable_runs
import torch

from groupgrad.checkpoints.choosing import choose
from groupgrad.errors import CheckpointError
from groupgrad.trainer.resuming import scale_learning_rate


@pytest.fixture
def second(straight, tmp_path) -> Path:
    """A copy of the checkpoint of step 2, alone in its folder."""
    return Path(shutil.copytree(straight[0] / "checkpoint-2", tmp_path / "run" / "checkpoint-2"))


def from_elsewhere(checkpoint: Path) -> Path:
    """Leaves only what transformers and TRL save."""
    for path in (checkpoint / "manifest.json", *checkpoint.glob("groupgrad_state_*")):
        path.unlink()
    return checkpoint


def test_a_change_of_the_working_directory_moves_nothing(new_trainer, straight, weights_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def moves(completion_ids, **_):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        os.chdir(tmp_path / "elsewhere")
        return repeatable_runs.letters_reward(completion_ids)

    new_trainer(Path("run"), reward=moves, max_steps=2, log_completions=True, num_completions_to_print=0).train()
    assert not list((tmp_path / "elsewhere").iterdir())
    os.chdir(tmp_path)
    trainer = new_trainer(Path("run"), reward=moves)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(weights_of(trainer), weights_of(straight[1]))
    trainer.save_model()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    kept = {"metrics.jsonl", "rollouts", "completions", "checkpoint-2", "checkpoint-3", "model.safetensors"}
    assert names >= kept
    metrics = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in metrics if "loss" in line] == [1, 2, 3]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("request_", ["auto", True], ids=str)
def test_auto_starts_anew_only_where_there_is_no_checkpoint(second, new_trainer, tmp_path, request_):
    assert choose(tmp_path / "other", "auto") is None
    assert [choose(second.parent, nothing) for nothing in (None, False, "", "False")] == [None] * 4
    with pytest.raises(ValueError, match=r"No valid checkpoint found.*resume_from_checkpoint='auto'"):
        choose(tmp_path / "other", True)
    # The field of the configuration counts where train() is called without an argument.
    trainer = new_trainer(second.parent, resume_from_checkpoint=str(request_).lower(), max_steps=2)
    assert trainer.train().global_step == 2
    assert trainer.progress.first_step == 2
    (second / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-2: model.safetensors is missing; remove the folders"):
        new_trainer(second.parent).train(resume_from_checkpoint=request_)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ("run", r"run', which has checkpoints and is none; set it to '.*run/checkpoint-2', the newest"),
        ("checkpoint-2", "no such folder; set it to the folder of a checkpoint, or to True for the newest"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_one_that_is(second, monkeypatch, tmp_path, request_, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=text):
        choose(second.parent, request_)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "groupgrad_state_0.pt"])
def test_allow_partial_resume_goes_on_and_says_what_is_new(second, new_trainer, caplog, name):
    (second / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"is damaged: {name} has 0 bytes.*allow_partial_resume=True goes on"):
        new_trainer(second.parent).train(str(second))
    trainer = new_trainer(
        second.parent, allow_partial_resume=True, save_strategy="no", lr_scheduler_type="linear", max_steps=3
    )
    trainer.train(str(second))
    assert trainer.state.global_step == 3
    assert f"checkpoint-2 starts without {name}, which has 0 bytes" in caplog.text
    assert trainer.state.log_history[-2]["learning_rate"] == pytest.approx(1e-2 / 3)
    moments = [state["step"] for state in trainer.optimizer.state.values()]
    assert {int(step) for step in moments} == {1 if name == "optimizer.pt" else 3}


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json"])
def test_no_run_starts_without_weights(second, new_trainer, name):
    (second / name).unlink()
    with pytest.raises(CheckpointError, match=f"is damaged: {name} is missing; resume_from_checkpoint=True takes"):
        new_trainer(second.parent, allow_partial_resume=True).train(str(second))


@pytest.mark.parametrize("applied", [False, True], ids=["named", "applied"])
def test_changed_options_are_listed(second, straight, new_trainer, caplog, applied):
    settings = {"learning_rate": 5e-3, "temperature": 0.7, "weight_decay": 0.1, "save_strategy": "no"}
    trainer = new_trainer(second.parent, resume_learning_rate=applied, **settings)
    trainer.train(str(second))
    (message,) = [r.getMessage() for r in caplog.records if "options differ" in r.getMessage()]
    lines = {line.split()[0]: line.split(maxsplit=3)[1:] for line in message.splitlines()[1:]}
    assert lines["option"] == ["then", "now", "in force"]
    assert lines["temperature"] == ["1.0", "0.7", "now"]
    assert lines["weight_decay"] == ["0.0", "0.1", "then, the optimizer's state has it"]
    rate = "now" if applied else "then; resume_learning_rate=True applies the new one"
    assert lines["learning_rate"] == ["0.01", "0.005", rate]
    assert set(lines) == {"option", "temperature", "weight_decay", "learning_rate"}
    assert trainer.state.log_history[-2]["learning_rate"] == (5e-3 if applied else 1e-2)


def test_a_schedule_that_multiplies_the_rate_goes_on_from_the_new_one():
    """Three times the rate of 0.1, which the schedule then halves."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scale_learning_rate(optimizer, scheduler, 3.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3, rel=1e-12)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.15, rel=1e-12)


def test_another_optimizer_is_refused(second, new_trainer, caplog):
    with pytest.raises(CheckpointError, match=r"is AdamW and this run's is SGD \(optim='sgd'\).*set optim as it was"):
        new_trainer(second.parent, optim="sgd").train(str(second))
    new_trainer(second.parent, optim="sgd", allow_partial_resume=True, save_strategy="no").train(str(second))
    assert "this run's SGD starts anew" in caplog.text


def test_an_optimizer_with_other_meanings_of_the_options_is_resumed(new_trainer, tmp_path, weights_of, caplog):
    """Adafactor has a pair of `eps`."""
    settings = {"optim": "adafactor", "learning_rate": 1e-3}
    straight = new_trainer(tmp_path, **settings)
    straight.train()
    resumed = new_trainer(tmp_path, save_strategy="no", **settings)
    resumed.train(str(tmp_path / "checkpoint-2"))
    assert torch.equal(weights_of(resumed), weights_of(straight))
    assert "options differ" not in caplog.text


def test_a_new_reference_has_rollouts_sampled_anew(new_trainer, tmp_path, caplog):
    settings = {"steps_per_generation": 2, "max_steps": 2}
    new_trainer(tmp_path, **settings).train()
    resumed = new_trainer(tmp_path, save_strategy="no", beta=0.1, **settings)
    resumed.train(str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 2
    assert (
        "holds its rollouts without the reference model's log-probs, which beta above 0 needs; they are" in caplog.text
    )


def test_a_checkpoint_from_elsewhere_loads_with_a_remark(second, straight, new_trainer, weights_of, caplog):
    from_elsewhere(second)
    trainer = new_trainer(second.parent, save_strategy="no", learning_rate=5e-3)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-2 has no manifest.json: an earlier release, transformers or TRL wrote it" in caplog.text
    assert "learning_rate  0.01  0.005  then; resume_learning_rate=True" in caplog.text
    # Nothing of a generation batch was in use, so the run is the undisturbed one.
    assert torch.equal(weights_of(trainer), weights_of(straight[1]))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_from_elsewhere_with_one_of_optimizer_and_schedule(second, new_trainer, caplog, name):
    (from_elsewhere(second) / name).unlink()
    with pytest.raises(CheckpointError, match=rf"checkpoint-2 lacks {name}.*allow_partial_resume=True"):
        new_trainer(second.parent).train(str(second))
    settings = {"save_strategy": "no", "lr_scheduler_type": "linear", "max_steps": 3}
    trainer = new_trainer(second.parent, allow_partial_resume=True, **settings)
    trainer.train(str(second))
    assert f"{name} of {second}: starts anew" in caplog.text
    assert trainer.state.log_history[-2]["learning_rate"] == pytest.approx(1e-2 / 3)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {1 if name == "optimizer.pt" else 3}


def test_a_half_written_checkpoint_from_elsewhere_is_skipped(second, straight, tmp_path, caplog):
    shutil.copytree(straight[0] / "checkpoint-1", second.parent / "checkpoint-1")
    marker = from_elsewhere(second) / "checkpoint-is-incomplete.txt"
    marker.touch()
    assert choose(second.parent, True).folder.name == "checkpoint-1"
    assert "skipped checkpoint-2: checkpoint-is-incomplete.txt says that its save was not finished" in caplog.text
    marker.unlink()
    (second / "trainer_state.json").unlink()
    assert choose(second.parent, True).folder.name == "checkpoint-1"
    assert "skipped checkpoint-2: trainer_state.json is missing" in caplog.text


def test_another_micro_batch_continues_the_data(second, straight, new_trainer, weights_of, caplog):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = new_trainer(second.parent, save_strategy="no", **sizes)
    trainer.train(resume_from_checkpoint=True)
    expected = weights_of(straight[1])
    assert (weights_of(trainer) - expected).norm() / expected.norm() < 1e-5
    assert "sampled again" not in caplog.text and "not used" not in caplog.text


@pytest.mark.quick("map")
@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
def test_other_sizes_of_steps_continue_the_data(new_trainer, tmp_path, caplog, stream):
    seen: list[str] = []

    def reward(prompts, completion_ids, **_):
        seen.extend(prompts[::4])
        return [float(len(ids)) for ids in completion_ids]

    settings = {"reward": reward, "save_only_model": True, "stream": stream}
    new_trainer(tmp_path / "straight", max_steps=16, save_strategy="no", **settings).train()
    expected = seen.copy()
    seen.clear()
    new_trainer(tmp_path, max_steps=3, **settings).train()
    # Four prompts a step, then two, then one, in two starts: 16 rows are an epoch of eight, four and two steps.
    trainer = new_trainer(tmp_path, max_steps=6, per_device_train_batch_size=16, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.resume.data_offset == 6 - 12
    new_trainer(tmp_path, max_steps=9, per_device_train_batch_size=4, **settings).train(resume_from_checkpoint=True)
    assert len(seen) == 3 * 2 + 3 * 4 + 3
    assert seen == expected[: len(seen)]
    assert "the data go on behind its 6 prompts" in caplog.text
    assert "the data go on behind its 18 prompts" in caplog.text


def test_a_damaged_best_model_is_not_loaded(second, straight, new_trainer):
    trainer = new_trainer(second.parent, save_strategy="no")
    trainer.state.best_model_checkpoint = str(second)
    trainer._load_best_model()
    assert not torch.equal(trainer.model.lm_head.weight, straight[1].model.lm_head.weight)
    (second / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 0 bytes"):
        trainer._load_best_model()
