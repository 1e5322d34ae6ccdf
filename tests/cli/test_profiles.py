"""`groupgrad train` and `groupgrad check` on two processes, started by each launch profile.

Those of ZeRO need DeepSpeed (`make test-deepspeed`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from groupgrad.apps.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
PROFILES = ["ddp", "fsdp2", *(pytest.param(name, marks=NEEDS_DEEPSPEED) for name in ("zero1", "zero2", "zero3"))]
CONFIG = {
    "dataset_name": "rows.jsonl",
    "reward_funcs": ["own_rewards.first_token"],
    "max_steps": 2,
    "generation_batch_size": 8,
    "num_generations": 2,
    "max_completion_length": 4,
    "learning_rate": 0.01,
    "beta": 0.5,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
}
REWARDS = """
import os, signal
import torch

def first_token(completion_ids, **columns):
    return [float(ids[0] % 7) for ids in completion_ids]

def is_killed(completion_ids, **columns):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return first_token(completion_ids)

def breaks_the_model(completion_ids, **columns):
    def forward(*arguments, **named):
        raise RuntimeError("no forward pass")
    if os.environ["RANK"] == "1":
        torch.nn.Embedding.forward = forward
    return first_token(completion_ids)
"""
ON_TWO = ("--num-processes", "2", "--per_device_train_batch_size", "4")


@pytest.fixture
def groupgrad(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`groupgrad(command, *flags)` runs a command on a small run in its folder; the finished process."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"what {i}"}) + "\n" for i in range(8)))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "model_name_or_path": str(model_dir)}))
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(command: str, *flags: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "groupgrad", command, "--config", "run.yaml", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500, check=False)

    return run


def weights(folder: Path) -> torch.Tensor:
    """All weights of a saved model."""
    found = load_file(folder / "model.safetensors")
    return torch.cat([found[key].reshape(-1) for key in sorted(found)])


@pytest.mark.parametrize("profile", PROFILES)
def test_two_processes_train_what_one_trains(groupgrad: Any, model_dir: Path, tmp_path: Path, profile: str) -> None:
    """The KL of the second step depends on the update of the first, so both losses are compared."""
    run = ["train", "--config", "run.yaml", "--output_dir", "one", "--per_device_train_batch_size", "8"]
    assert main(run) == 0
    sharding = () if profile == "ddp" else ("--accelerate-config", profile)
    done = groupgrad("train", "--output_dir", "two", *ON_TWO, *sharding)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "two" / "events.jsonl").read_text().splitlines()[0])["processes"] == 2
    losses = []
    for name in ("one", "two"):
        events = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([event["loss"] for event in events if "loss" in event])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5, rel=1e-5)
    assert len(losses[0]) == 2 and abs(losses[0][1]) > 1e-4
    if profile.startswith("zero"):  # whose saved weights are those of tests/faults/test_zero_saves.py
        return
    before, one, two = (weights(folder) for folder in (model_dir, tmp_path / "one", tmp_path / "two"))
    assert float((one - before).norm() / one.norm()) > 1e-3
    assert float((one - two).norm() / one.norm()) < 1e-5


def agreement(shown: str) -> float:
    """The number of the line, which is `ok`."""
    gap = re.search(
        r"^ok +agreement +log-probs of sampler and trainer differ by (\S+) nats at most", shown, re.MULTILINE
    )
    assert gap is not None, shown[-3000:]
    return float(gap[1])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_check_makes_its_round_on_all_processes(groupgrad: Any, tmp_path: Path, profile: str) -> None:
    """Its numbers are those of both. Sharded training computes what is known from sampling again, and measures no gap
    to it, so the round does."""
    shown = groupgrad("check", *ON_TWO, "--accelerate-config", profile, "--prompts", "1", "--output_dir", "out").stdout
    assert "an optimizer step trains 8 completions (4 a micro-batch x 1 micro-batch x 2 processes)" in shown
    assert "2 completions of 1 prompt were sampled, scored and trained on" in shown
    assert agreement(shown) < 1e-5
    memory = re.search(r"^ok +memory +2 processes with libraries and model took at most (\S+) GiB", shown, re.MULTILINE)
    assert memory is not None and float(memory[1]) > 0.4  # each has imported torch and transformers
    assert shown.count("an optimizer step") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("profile", "reward", "reason"),
    [
        ("ddp", "is_killed", r"rank 1 \(pid \d+ on .*\) went away"),
        ("fsdp2", "breaks_the_model", r"rank 1 .*failed with RuntimeError: no forward pass"),
    ],
)
def test_a_failure_of_one_process_is_in_the_table(groupgrad: Any, profile: str, reward: str, reason: str) -> None:
    """The launcher ends the others of a process that has gone, and the watch one that waits inside a collective."""
    done = groupgrad("check", *ON_TWO, "--accelerate-config", profile, "--reward_funcs", f"own_rewards.{reward}")
    assert done.returncode == 1
    rows = rf"^ok +steps +.*\nerror +round +it failed with .*{reason}.*\n\n1 error, "
    assert re.search(rows, done.stdout, re.MULTILINE), done.stdout


@NEEDS_DEEPSPEED
def test_a_check_replaces_the_sizes_of_a_zero_configuration(groupgrad: Any, tmp_path: Path) -> None:
    """Its optimizer is DeepSpeed's; with a learning rate of its own the round would change weights before it scores."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "train_batch_size": 8}
    content = {**sizes, "zero_optimization": {"stage": 2}, "optimizer": optimizer}
    (tmp_path / "zero.json").write_text(json.dumps(content))
    shown = groupgrad("check", *ON_TWO, "--deepspeed", "zero.json", "--prompts", "2").stdout
    assert "an optimizer step trains 8 completions" in shown
    assert "4 completions of 2 prompts were sampled, scored and trained on" in shown
    assert agreement(shown) < 1e-5
