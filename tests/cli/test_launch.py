"""`groupgrad train --num-processes` and `--accelerate-config` start the processes of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml

from groupgrad.apps.cli.launch import PROFILES, launch_command
from groupgrad.apps.cli.main import main


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_a_profile_is_a_file_for_accelerate(name):
    """The other flags stay; a number alone is data parallel."""
    flags = ["--config", "run.yaml", "--set", "seed=3"]
    assert launch_command(flags) is None
    profile = [] if name == "ddp" else ["--accelerate-config", name]
    command = launch_command([*profile, "--num_processes=8", *flags])
    assert command is not None
    assert command[1:4] == ["-m", "accelerate.commands.launch", "--config_file"]
    assert command[4:] == [str(PROFILES[name]), "--num_processes", "8", "-m", "groupgrad", "train", *flags]
    content = yaml.safe_load(Path(command[4]).read_text())
    stage = content.get("deepspeed_config", {}).get("zero_stage")
    assert stage == {"zero1": 1, "zero2": 2, "zero3": 3}.get(name)
    assert content.get("fsdp_config", {}).get("fsdp_version") == (2 if name == "fsdp2" else None)
    assert "mixed_precision" not in content, "bf16 says it: on accelerators by default, on a CPU only if asked for"


def test_all_is_one_process_for_each_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    command = launch_command(["--num-processes", "all"])
    assert command is not None and command[5:7] == ["--num_processes", "4"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-processes", "two"], "--num-processes two is not a number from 1 on, or 'all'"),
        (["--num-processes", "0"], "not a number from 1 on"),
        (["--num-processes", "all"], "no GPU is visible; give a number"),
        (
            ["--num-processes", "2", "--accelerate-config", "zero33"],
            "neither a profile nor a file; did you mean 'zero3'",
        ),
        (
            ["--accelerate-config", "fsdp2"],
            "^--accelerate-config fsdp2 starts one process for each GPU, and no GPU is visible; add --num-processes "
            "with a number$",
        ),
    ],
)
def test_what_cannot_be_launched(argv, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=words):
        launch_command(argv)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="started by a launcher"):
        launch_command(argv)


def test_check_starts_the_processes_that_train_would(monkeypatch, capsys):
    """So a command line is checked by writing `check` in place of `train`."""
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command) or 0)
    flags = ["--config", "run.yaml", "--num-processes", "2"]
    assert main(["train", *flags]) == main(["check", *flags]) == 0
    train, check = started
    assert check == [{"train": "check"}.get(word, word) for word in train]
    assert main(["check", "--num-processes", "0"]) == 2
    assert "groupgrad check: error: --num-processes 0 is not a number from 1 on" in capsys.readouterr().err
