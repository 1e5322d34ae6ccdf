"""The profiles `zero1`, `zero2` and `zero3` train what one process trains, and `groupgrad check` tries them.

They need DeepSpeed (`make test-deepspeed`).
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
import yaml

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

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
    "report_to": "none",
    "save_strategy": "no",
}
REWARDS = """
def first_token(completion_ids, **columns):
    return [float(ids[0] % 7) for ids in completion_ids]
"""


@pytest.fixture
def groupgrad(model_dir: Path, tmp_path: Path) -> Any:
    """`groupgrad(command, *flags)` runs a command on a small run in its folder; the finished process."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"what {i}"}) + "\n" for i in range(8)))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "model_name_or_path": str(model_dir)}))
    (tmp_path / "own_rewards.py").write_text(REWARDS)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command, *flags = arguments
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "1000"}
        words = [sys.executable, "-m", "groupgrad", command, "--config", "run.yaml", *flags]
        return subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
        )

    return run


@pytest.mark.parametrize("profile", ["zero1", "zero2", "zero3"])
def test_two_processes_have_the_losses_of_one(groupgrad: Any, tmp_path: Path, profile: str) -> None:
    """The KL of the second step depends on the update of the first, so both losses are compared."""
    two = ["--num-processes", "2", "--accelerate-config", profile, "--per_device_train_batch_size", "4"]
    losses = {}
    for name, flags in {"one": ["--per_device_train_batch_size", "8"], "two": two}.items():
        done = groupgrad("train", "--output_dir", name, *flags)
        assert done.returncode == 0, done.stderr[-3000:]
        events = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [event["loss"] for event in events if "loss" in event]
    assert losses["two"] == pytest.approx(losses["one"], abs=1e-5, rel=1e-5)
    assert len(losses["one"]) == 2 and abs(losses["one"][1]) > 1e-4


def agreement(shown: str) -> float:
    """The number of the line, which is `ok`."""
    gap = re.search(
        r"^ok +agreement +log-probs of sampler and trainer differ by (\S+) nats at most", shown, re.MULTILINE
    )
    assert gap is not None, shown[-3000:]
    return float(gap[1])


@pytest.mark.parametrize("profile", ["zero1", "zero2", "zero3"])
def test_a_check_makes_a_small_round_and_measures_the_agreement(groupgrad: Any, profile: str) -> None:
    flags = ["--num-processes", "2", "--accelerate-config", profile, "--per_device_train_batch_size", "4"]
    shown = groupgrad("check", *flags, "--prompts", "1").stdout
    assert "2 completions of 1 prompt were sampled, scored and trained on" in shown
    assert agreement(shown) < 1e-5


def test_a_check_replaces_the_sizes_of_a_deepspeed_configuration(groupgrad: Any, tmp_path: Path) -> None:
    """Its optimizer is DeepSpeed's; with a learning rate of its own the round would change weights before it scores."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "train_batch_size": 8}
    content = {**sizes, "zero_optimization": {"stage": 2}, "optimizer": optimizer}
    (tmp_path / "zero.json").write_text(json.dumps(content))
    flags = ["--num-processes", "2", "--deepspeed", "zero.json", "--per_device_train_batch_size", "4"]
    shown = groupgrad("check", *flags, "--prompts", "2").stdout
    assert "an optimizer step trains 8 completions" in shown
    assert "4 completions of 2 prompts were sampled, scored and trained on" in shown
    assert agreement(shown) < 1e-5
