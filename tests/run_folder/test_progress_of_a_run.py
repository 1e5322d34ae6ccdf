"""The output of a whole run, on a terminal and in a file."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
from datasets import Dataset
from small_runs import SETTINGS

from groupgrad import GRPOConfig, GRPOTrainer


def length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


@pytest.fixture
def make_trainer(model_dir: Path, tmp_path: Path) -> Callable[..., GRPOTrainer]:
    def make(**settings: Any) -> GRPOTrainer:
        defaults: dict[str, Any] = {
            **SETTINGS,
            "max_steps": 4,
            "logging_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 2,
            "num_generations": 2,
        }
        config = GRPOConfig(str(tmp_path / "run"), **{**defaults, **settings})
        data = Dataset.from_list([{"prompt": f"{a}+1="} for a in range(4)])
        return GRPOTrainer(
            model=str(model_dir),
            reward_funcs=length_reward,
            args=config,
            train_dataset=data,
            eval_dataset=data.select([0]),
        )

    return make


def test_a_run_into_a_file_writes_plain_lines_and_no_bar(
    make_trainer: Callable[..., GRPOTrainer], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    make_trainer().train()
    out, err = capfd.readouterr()
    lines = [line.split()[:2] for line in out.splitlines()]
    assert [lines.pop(0)[0] for _ in range(5)] == ["columns", "batch", "prompts", "ending", "decoding"]
    assert lines == [["step", "2"], ["eval", "2"], ["step", "4"], ["eval", "4"], ["done:", "4"]]
    for stream in (out, err):
        assert not re.search(r"\r|\d%\||it/s|[█▏▎▍▌▋▊▉]", stream), stream


def unread_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def closed_file() -> TextIO:
    with open(os.devnull, "w") as file:
        return file


OUTPUTS: dict[str, Callable[[], TextIO | None]] = {
    "nobody reads": unread_pipe,
    "full disk": lambda: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"),
    "closed": closed_file,
    "none": lambda: None,
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_run_goes_on_without_standard_output(
    make_trainer: Callable[..., GRPOTrainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    output: str,
) -> None:
    monkeypatch.setattr("groupgrad.run_folder.terminal._failures", [])
    trainer = make_trainer(log_completions=True, eval_strategy="no", save_strategy="no", max_steps=2, logging_steps=1)
    monkeypatch.setattr(sys, "stdout", OUTPUTS[output]())
    trainer.train()
    monkeypatch.undo()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert caplog.text.count("standard output cannot be written") == (output != "none")
