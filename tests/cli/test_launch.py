"""`groupgrad train --num-processes` and `--accelerate-config` start the processes of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from groupgrad import compat
from groupgrad.apps.cli.launch import PROFILES, launch_command
from groupgrad.apps.cli.main import main

CONFIG = {
    "reward_funcs": ["own_rewards.first_token"],
    "max_steps": 2,
    "generation_batch_size": 8,
    "num_generations": 2,
    "max_completion_length": 4,
    "learning_rate": 0.01,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
}


def test_without_the_flags_nothing_is_launched():
    assert launch_command(["--config", "run.yaml", "--learning_rate", "1e-6"]) is None


def test_a_number_alone_is_data_parallel_and_the_other_flags_stay():
    command = launch_command(["--config", "run.yaml", "--num_processes", "2", "--set", "seed=3"])
    assert command is not None
    assert command[1:4] == ["-m", "accelerate.commands.launch", "--config_file"]
    assert command[4:7] == [str(PROFILES["ddp"]), "--num_processes", "2"]
    assert command[7:] == ["-m", "groupgrad", "train", "--config", "run.yaml", "--set", "seed=3"]


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_a_profile_is_a_file_for_accelerate(name, monkeypatch):
    monkeypatch.setattr(compat, "is_available", lambda name: True)
    command = launch_command(["--accelerate-config", name, "--num-processes=8", "--config", "run.yaml"])
    assert command is not None
    assert command[1:4] == ["-m", "accelerate.commands.launch", "--config_file"]
    assert command[4:] == [
        str(PROFILES[name]),
        *["--num_processes", "8", "-m", "groupgrad", "train", "--config", "run.yaml"],
    ]
    content = yaml.safe_load(Path(command[4]).read_text())
    stage = content.get("deepspeed_config", {}).get("zero_stage")
    assert stage == {"zero1": 1, "zero2": 2, "zero3": 3}.get(name)
    assert content.get("fsdp_config", {}).get("fsdp_version") == (2 if name == "fsdp2" else None)
    assert "mixed_precision" not in content, "bf16 says it: on accelerators by default, on a CPU only if asked for"


def test_all_is_one_process_for_each_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    command = launch_command(["--num-processes", "all"])
    assert command is not None and command[5:7] == ["--num_processes", "4"]
    with pytest.raises(ValueError, match="--num-processes 5 is more than the 4 visible GPUs"):
        launch_command(["--num-processes", "5"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-processes", "two"], "--num-processes two is not a number from 1 on, or 'all'"),
        (["--num-processes", "0"], "not a number from 1 on"),
        (["--num-processes", "all"], "no GPU is visible; give a number"),
        (["--accelerate-config", "zero33"], "neither a profile nor a file; did you mean 'zero3'"),
        (["--accelerate-config", "fsdp1"], "neither a profile nor a file; did you mean 'fsdp2'"),
    ],
)
def test_what_cannot_be_launched(argv, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    numbers = [] if argv[0] == "--num-processes" else ["--num-processes", "2"]
    with pytest.raises(ValueError, match=words):
        launch_command([*argv, *numbers])


@pytest.mark.parametrize("name", ["zero3", "own.yaml"])
def test_deepspeed_that_is_missing_is_named_before_processes_start(name, tmp_path, monkeypatch, capsys):
    """Without a traceback: the launcher would end in one."""
    (tmp_path / "own.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compat, "is_available", lambda name: name != "deepspeed")
    monkeypatch.setattr(os, "execv", lambda *_: 0)
    assert main(["train", "--accelerate-config", name, "--num-processes", "2"]) == 2
    shown = capsys.readouterr().err
    assert f"groupgrad train: error: --accelerate-config {name} needs 'deepspeed', which is not installed" in shown
    assert "pip install 'deepspeed>=0.16'" in shown and "--accelerate-config fsdp2" in shown


def test_a_profile_without_a_number_is_told_what_was_typed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError) as refused:
        launch_command(["--accelerate-config", "fsdp2"])
    assert str(refused.value) == (
        "--accelerate-config fsdp2 starts one process for each GPU, and no GPU is visible; add --num-processes with a "
        "number"
    )


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


@pytest.mark.slow
def test_a_check_makes_its_round_on_all_processes(model_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"what {i}"}) + "\n" for i in range(8)))
    content = {**CONFIG, "generation_batch_size": None, "per_device_train_batch_size": 4, "max_completion_length": 40}
    content |= {"model_name_or_path": str(model_dir), "dataset_name": "rows.jsonl"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "own_rewards.py").write_text(
        "def first_token(completion_ids, **columns):\n    return [float(ids[0] % 7) for ids in completion_ids]\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "groupgrad", "check", "--config", "run.yaml", "--output_dir", "out", "--num-processes", "2"],
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "1000"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    assert "an optimizer step trains 8 completions (4 a micro-batch x 1 micro-batch x 2 processes)" in done.stdout
    assert "8 completions of 4 prompts were sampled" in done.stdout
    assert done.stdout.count("an optimizer step") == 1 and not (tmp_path / "out").exists()


def test_a_process_of_a_launcher_launches_nothing_itself(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="a process that a launcher has started"):
        launch_command(["--num-processes", "2"])


def test_what_starts_the_processes_does_not_import_the_trainer():
    """Its seconds would come before those in which each process imports it."""
    ask = "import os, sys; os.execv = lambda *_: print('transformers' in sys.modules) or 0"
    start = "from groupgrad.apps.cli.main import main; sys.exit(main(['train', '--num-processes', '2']))"
    command = [sys.executable, "-c", f"{ask}; {start}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "profile", [pytest.param((), id="ddp"), pytest.param(("--accelerate-config", "fsdp2"), marks=pytest.mark.slow)]
)
def test_two_processes_train_what_one_trains(model_dir, tmp_path, monkeypatch, profile):
    flags = ["--num-processes", "2", *profile]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"what {i}"}) + "\n" for i in range(8)))
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({**CONFIG, "model_name_or_path": str(model_dir), "dataset_name": "rows.jsonl"})
    )
    (tmp_path / "own_rewards.py").write_text(
        "def first_token(completion_ids, **columns):\n    return [float(ids[0] % 7) for ids in completion_ids]\n"
    )
    run = ["train", "--config", "run.yaml", "--output_dir"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([*run, "one", "--per_device_train_batch_size", "8"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "groupgrad", *run, "two", "--per_device_train_batch_size", "4", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "two" / "events.jsonl").read_text().splitlines()[0])["processes"] == 2
    before, one, two = (all_weights(folder) for folder in (model_dir, tmp_path / "one", tmp_path / "two"))
    assert float((one - before).norm() / one.norm()) > 1e-3
    assert float((one - two).norm() / one.norm()) < 1e-5


def all_weights(folder):
    found = load_file(folder / "model.safetensors")
    return torch.cat([found[key].reshape(-1) for key in sorted(found)])
