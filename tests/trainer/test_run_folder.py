"""A run's folder: rollouts, metrics, events and configuration, through `train()`."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from step_events import At

from groupgrad.config.grpo_config import without_secrets
from groupgrad.kernels import status
from groupgrad.run_folder.rollout_files import RolloutFiles
from groupgrad.run_folder.run_files import parse_rollout_file, read_lines


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run, by step and row."""
    paths = sorted(path for path in (folder / "rollouts").iterdir() if parse_rollout_file(path.name))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_a_run_leaves_metrics_rollouts_events_and_settings(train, tokenizer, tmp_path):
    trainer = train(max_steps=2, save_strategy="steps", save_steps=2, hub_token="hf_private")
    folder = tmp_path / "run"

    metrics = list(read_lines(folder / "metrics.jsonl"))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [line["step"] for line in metrics if "loss" in line] == [1, 2]
    assert [line["reward"] for line in metrics if "loss" in line] == [entry["reward"] for entry in logged]

    rows = rollouts(folder)
    assert [(row["step"], row["row"], row["group"]) for row in rows[:5]] == [
        (1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 0), (1, 4, 1),
    ]  # fmt: skip
    first = [row for row in rows if row["step"] == 1]
    assert np.mean([row["reward"] for row in first]) == pytest.approx(logged[0]["reward"])
    assert all(row["reward"] == row["reward/letters_reward"] for row in rows)
    assert sum(row["advantage"] for row in first[:4]) == pytest.approx(0, abs=1e-3)
    entropies = [value for row in first for value in row["entropy"]]
    assert np.mean(entropies) == pytest.approx(logged[0]["entropy"], rel=1e-4)
    for row in rows:
        assert len(row["logprobs"]) == len(row["tokens"]) == len(row["completion_ids"])
        assert row["prompt_ids"] == tokenizer(row["prompt"])["input_ids"]
        assert all(value < 0 for value in row["logprobs"])
        assert re.sub(r"<\w+>", "", "".join(row["tokens"])) == row["completion"]
    assert len({row["prompt_id"] for row in first}) == len({row["prompt"] for row in first}) == 2
    assert json.loads(rows[0]["data"])["row"] >= 0
    assert all(row["seconds/letters_reward"] > 0 for row in rows)

    events = list(read_lines(folder / "events.jsonl"))
    assert [event["event"] for event in events] == ["started", "checkpoint", "ended"]
    text = (folder / "run_config.json").read_text()
    assert "hf_private" not in text
    assert json.loads(text)["settings"]["num_generations"] == 4
    assert json.loads(text)["versions"]["CPU kernels"] == status()


def test_the_last_steps_have_a_loss_where_they_fill_no_window(train, tmp_path):
    """The log history leaves it out, as TRL's does; the run folder has it in the line of the training's end."""
    lines, history = {}, {}
    for every in (1, 3):
        history[every] = train(
            max_steps=5, logging_steps=every, output_dir=str(tmp_path / str(every))
        ).state.log_history
        lines[every] = [line for line in read_lines(tmp_path / str(every) / "metrics.jsonl") if "loss" in line]
    steps, windows = lines[1], lines[3]
    assert [line["step"] for line in windows] == [3, 5] and len(steps) == 5
    assert windows[1]["loss"] == pytest.approx(np.mean([line["loss"] for line in steps[3:]]), abs=1e-7)
    for name in ("grad_norm", "learning_rate"):
        assert [line[name] for line in windows] == [steps[2][name], steps[4][name]], name
    assert windows[1]["reward"] == pytest.approx(np.mean([line["reward"] for line in steps[3:]]))
    assert [entry["step"] for entry in history[3] if "loss" in entry] == [3]
    assert not {"grad_norm", "learning_rate"} & history[3][-1].keys()


def test_an_engine_without_entropies_gets_those_of_the_training_pass(train, make_trainer, tmp_path):
    exact, other = tmp_path / "exact", tmp_path / "other"
    train(max_steps=1, output_dir=str(exact), rollout_engine="native")
    trainer = make_trainer(max_steps=1, output_dir=str(other), rollout_engine="native")
    source = trainer.components.collector.rollouts

    class Silent:
        """The same rollouts without the engine's numbers."""

        is_exact = False

        def __getattr__(self, name: str) -> Any:
            return getattr(source, name)

        def __call__(self, request: Any) -> Any:
            return [replace(rollout, sampling_logprobs=None, sampling_entropy=None) for rollout in source(request)]

    trainer.components.collector.rollouts = trainer.sampler_logprobs._source = Silent()
    trainer.train()
    for one, two in zip(rollouts(exact), rollouts(other)):
        assert one["completion_ids"] == two["completion_ids"]
        assert one["logprobs"] == pytest.approx(two["logprobs"], abs=1e-5)
        assert one["entropy"] == pytest.approx(two["entropy"], abs=1e-5)


def test_a_resumed_run_has_each_step_once(make_trainer, train, tmp_path):
    """Neither another run in the same folder nor one that is resumed from another folder is mixed with it."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train(**settings)
    folder = tmp_path / "run"
    before = [(row["step"], row["row"], row["completion"]) for row in rollouts(folder)]
    (folder / "rollouts" / "step_000009.0.parquet").write_bytes(b"of a longer run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "torn')

    make_trainer(**settings).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert [(row["step"], row["row"], row["completion"]) for row in rollouts(folder)] == before
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4]
    events = [(event["event"], event["step"]) for event in read_lines(folder / "events.jsonl")]
    assert events[4:] == [("resumed", 2), ("checkpoint", 4), ("ended", 4)]

    second = {"max_steps": 3, "output_dir": str(tmp_path / "second")}
    train(**{**second, "max_steps": 2})
    make_trainer(**second).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert {row["step"] for row in rollouts(tmp_path / "second")} == {3}
    assert {line["step"] for line in read_lines(tmp_path / "second" / "metrics.jsonl")} == {3}
    assert {row["step"] for row in rollouts(tmp_path / "second" / "previous_run")} == {1, 2}


def test_a_folder_that_cannot_be_written_ends_no_run(make_trainer, tmp_path, monkeypatch, caplog):
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr("groupgrad.run_folder.rollout_files.replace_file", full)
    trainer = make_trainer(max_steps=2)
    with caplog.at_level(logging.WARNING, logger="groupgrad"):
        trainer.train()
    assert trainer.state.global_step == 2
    said = [record.message for record in caplog.records if "run folder" in record.message]
    assert len(said) == 1 and "No space left on device" in said[0]


def test_rollouts_keep_bounds_the_folder_and_is_said_once(train, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="groupgrad"):
        train(max_steps=8, rollouts_keep="60kB")
    folder = tmp_path / "run"
    sizes = [path.stat().st_size for path in (folder / "rollouts").iterdir()]
    assert 20_000 < sum(sizes) <= 60_000
    rows = rollouts(folder)
    groups = {(row["step"], row["group"]) for row in rows}
    assert len(rows) == 4 * len(groups) < 8 * 8  # whole groups
    assert len([r for r in caplog.records if "rollouts_keep" in r.message]) == 1
    assert [event for event in read_lines(folder / "events.jsonl") if "rollouts_keep" in event.get("text", "")]

    train(max_steps=1, rollouts_keep="0", output_dir=str(tmp_path / "none"))
    assert not (tmp_path / "none" / "rollouts").exists()


def test_warnings_and_the_end_are_events(train, tmp_path, capsys):
    def failing(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 1:
            raise ValueError("no more")
        logging.getLogger("groupgrad.rewards").warning("a pale reward")
        return [0.0] * len(completion_ids)

    logging.getLogger("groupgrad").propagate, before = False, logging.getLogger("groupgrad").propagate
    try:
        with pytest.raises(Exception, match="no more"):
            train(reward_funcs=failing, max_steps=3)
    finally:
        logging.getLogger("groupgrad").propagate = before
    events = list(read_lines(tmp_path / "run" / "events.jsonl"))
    assert [event["event"] for event in events] == ["started", "warning", "failed"]
    assert events[1]["text"] == "a pale reward" and "no more" in events[2]["text"]
    assert "a pale reward" in capsys.readouterr().err  # as without a run folder


def test_secrets_are_hidden():
    settings = {"hub_token": "hf_a", "eos_token": "</s>", "max_tokens": 5, "model_init_kwargs": {"token": "hf_b"}}
    more = {"access_token": "a", "headers": {"Authorization": "Bearer b"}, "text": '{"api_key": "x"}'}
    assert without_secrets({**settings, **more}) == {
        "access_token": "<hidden>",
        "headers": {"Authorization": "<hidden>"},
        "hub_token": "<hidden>",
        "eos_token": "</s>",
        "max_tokens": 5,
        "model_init_kwargs": {"token": "<hidden>"},
        "text": "<hidden>",
    }


def test_held_out_rollouts_are_stored_apart(train, tools, tmp_path):
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    trainer = train(**settings, trainer={"eval_dataset": {"a": tools.prompts(5), "b": tools.prompts(2)}})
    folder = tmp_path / "run"
    for name, count in (("a", 5), ("b", 2)):
        rows = pq.read_table(folder / "eval_rollouts" / f"eval_{name}" / "step_000002.0.parquet").to_pylist()
        assert [(row["phase"], row["row"], row["group"]) for row in rows] == [
            (f"eval_{name}", row, row // 4) for row in range(4 * count)
        ]
        (logged,) = [e for e in trainer.state.log_history if f"eval_{name}_reward" in e and e["step"] == 2]
        assert np.mean([row["reward"] for row in rows]) == pytest.approx(logged[f"eval_{name}_reward"])
    assert {row["phase"] for row in rollouts(folder)} == {"train"}


def test_nothing_is_recorded_where_an_earlier_run_cannot_be_moved(train, tmp_path, monkeypatch, caplog):
    train(max_steps=1)
    folder = tmp_path / "run"
    before = (folder / "metrics.jsonl").read_text()

    def refuse(folder: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("groupgrad.run_folder.run_files.set_aside", refuse)
    with caplog.at_level(logging.WARNING, logger="groupgrad"):
        train(max_steps=2)
    assert (folder / "metrics.jsonl").read_text() == before
    assert [path.name for path in (folder / "rollouts").iterdir()] == ["step_000001.0.parquet"]
    assert "Permission denied" in caplog.text


def test_metrics_before_a_checkpoint_are_there_though_rollouts_wait_for_the_disk(make_trainer, tmp_path, monkeypatch):
    is_free, found = threading.Event(), []
    monkeypatch.setattr(RolloutFiles, "write", lambda *_, **__: is_free.wait(60))

    def look(_: Any) -> None:
        found.extend([line["step"] for line in read_lines(tmp_path / "run" / name)] for name in names)
        is_free.set()

    names = ("metrics.jsonl", "weights.jsonl")
    trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=2)
    trainer.add_callback(At("on_save", look))
    trainer.train()
    assert found == [[1, 2], [0, 1, 2]]


def test_a_tokenizer_that_fails_costs_the_texts_alone(train, tmp_path, monkeypatch):
    def broken(self: Any, ids: Any) -> list[str]:
        raise RuntimeError("no texts")

    monkeypatch.setattr("groupgrad.run_folder.token_texts.TokenTexts._find", broken)
    trainer = train(max_steps=1)
    rows = rollouts(tmp_path / "run")
    assert trainer.state.global_step == 1 and len(rows) == 8
    assert all(row["tokens"] == [f"<{number}>" for number in row["completion_ids"]] for row in rows)


def test_files_of_ranks_that_are_gone_count(tmp_path):
    for rank in range(3):
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts" / f"step_000001.{rank}.parquet").write_bytes(b"x" * 100)
    options = {"keep_bytes": 1000, "seed": 0}
    used = [RolloutFiles(tmp_path / "rollouts", rank=r, world_size=2, **options)._bytes_on_disk() for r in range(2)]
    assert used == [200, 100]
