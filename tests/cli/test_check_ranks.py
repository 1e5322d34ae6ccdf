"""`groupgrad check` on two processes: their failures are in its table, and its numbers are those of both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CONFIG = {
    "dataset_name": "rows.jsonl",
    "reward_funcs": ["own_rewards.first_token"],
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "max_completion_length": 12,
    "max_steps": 2,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "output_dir": "out",
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


@pytest.fixture
def checked(model_dir: Path, tmp_path: Path) -> Any:
    """`checked(*flags)`: text and exit code of a check of the small run on two processes."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"what {i}"}) + "\n" for i in range(16)))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "model_name_or_path": str(model_dir)}))
    (tmp_path / "own_rewards.py").write_text(REWARDS)

    def check(*flags: str) -> tuple[str, int]:
        command = [sys.executable, "-m", "groupgrad", "check", "--config", "run.yaml", "--num-processes", "2", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "1000"}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        return done.stdout or done.stderr[-3000:], done.returncode

    return check


@pytest.mark.parametrize(
    ("profile", "reward", "reason"),
    [
        ("ddp", "is_killed", r"rank 1 \(pid \d+ on .*\) went away"),
        ("fsdp2", "breaks_the_model", r"rank 1 .*failed with RuntimeError: no forward pass"),
    ],
)
def test_a_failure_of_one_process_is_in_the_table(checked: Any, profile: str, reward: str, reason: str) -> None:
    """The launcher ends the others of a process that has gone, and the watch one that waits inside a collective."""
    shown, code = checked("--accelerate-config", profile, "--reward_funcs", f"own_rewards.{reward}")
    assert code == 1
    assert re.search(rf"^ok +steps +.*\nerror +round +it failed with .*{reason}.*\n\n1 error, ", shown, re.MULTILINE)


@pytest.mark.parametrize("profile", ["ddp", "fsdp2"])
def test_the_numbers_are_those_of_both_processes(checked: Any, profile: str) -> None:
    """Under FSDP 2 training computes what is known from sampling again, and measures no gap to it."""
    shown, _ = checked("--accelerate-config", profile, "--prompts", "1", "--max_completion_length", "40")
    assert "4 completions of 1 prompt were sampled" in shown
    gap = re.search(
        r"^ok +agreement +log-probs of sampler and trainer differ by (\S+) nats at most", shown, re.MULTILINE
    )
    assert gap is not None and float(gap[1]) < 1e-5
    memory = re.search(r"^ok +memory +2 processes with libraries and model took at most (\S+) GiB", shown, re.MULTILINE)
    assert memory is not None and float(memory[1]) > 0.4  # each has imported torch and transformers
