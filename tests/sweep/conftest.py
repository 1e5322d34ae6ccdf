"""Small sweeps of a few fast steps, and the same runs made alone."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from small_runs import EOS, PROMPTS, SETTINGS, letters_reward, without_times

from groupgrad import GRPOConfig, GRPOTrainer, Sweep
from groupgrad.apps.cli import main as cli
from groupgrad.apps.sweep.store import Store
from groupgrad.run_folder.run_files import read_lines

REWARD = """
def letters(completion_ids, **kwargs):
    return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]
"""

BASE = {**SETTINGS, "max_steps": 6, "per_device_train_batch_size": 8, "lr_scheduler_type": "linear"}
HALVING = {"first": 0.34}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def equal_files(first: Path, second: Path, name: str = "model.safetensors") -> bool:
    """True if two folders hold the same weights, bit for bit."""
    one, other = load_file(first / name), load_file(second / name)
    return set(one) == set(other) and all(torch.equal(one[key], other[key]) for key in one)


def logs(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run folder without measured times and without the summary of the end."""
    rows = [row for row in read_lines(path / "metrics.jsonl") if "train_runtime" not in row]
    return without_times([{key: value for key, value in row.items() if key != "time"} for row in rows])


def assert_same(first: Path, second: Path, name: str = "model.safetensors") -> None:
    """Two folders hold the same weights and the same metrics."""
    assert equal_files(first, second, name)
    assert logs(first) == logs(second)


def assert_arms_equal_runs_alone() -> None:
    """Each arm of the sweep `out` is what `groupgrad train` makes of its file."""
    for arm in Store("out").arms():
        assert (arm.state, arm.step) == ("done", 6)
        folder, alone = Path("out/arms") / arm.name, Path("alone") / arm.name
        assert cli.main(["train", "--config", str(folder / "run.yaml"), "--output_dir", str(alone)]) == 0
        assert_same(folder, alone)


def wait_for_steps(process: subprocess.Popen[bytes], num_steps: int) -> list[psutil.Process]:
    """Waits until the arms have made so many steps; the processes that the sweep has started."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if Path("out/sweep.sqlite").is_file() and sum(arm.step for arm in Store("out").arms()) >= num_steps:
            return psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    raise AssertionError(f"the sweep has not made {num_steps} steps (exit code {process.poll()})")


def trainer_arguments(make_model: Callable[..., Any], tokenizer: Any) -> dict[str, Any]:
    """Arguments of a trainer, whose model ends a fifth of its completions at each token."""
    model = make_model(0, initializer_range=0.15)
    model.generation_config.eos_token_id = EOS
    return {
        "model": model,
        "reward_funcs": [letters_reward],
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "processing_class": tokenizer,
    }


@pytest.fixture
def arguments(make_model: Callable[..., Any], tokenizer: Any) -> dict[str, Any]:
    return trainer_arguments(make_model, tokenizer)


RATES = {"learning_rate": [1e-4, 1e-2, 2e-2, 3e-2]}


@pytest.fixture(scope="session")
def halved(make_model: Any, make_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A sweep of `RATES` that halving has decided, for all who look at it: its folder, results and log lines."""
    torch.set_num_threads(1)
    folder, lines = tmp_path_factory.mktemp("sweeps") / "halved", list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger, level = logging.getLogger("groupgrad"), logging.getLogger("groupgrad").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    arguments = trainer_arguments(make_model, make_tokenizer())
    results = Sweep(folder, RATES, args=BASE, halving=HALVING, **arguments).run()
    logger.removeHandler(handler)
    logger.setLevel(level)
    return SimpleNamespace(folder=folder, results=results, lines=lines)


@pytest.fixture
def make_sweep(arguments: dict[str, Any], tmp_path: Path) -> Callable[..., Sweep]:
    """`make_sweep(vary, args={...}, **keywords)`: a sweep in `tmp_path / "sweep"`."""

    def make(vary: Any = None, *, folder: str = "sweep", args: Any = None, **keywords: Any) -> Sweep:
        return Sweep(tmp_path / folder, vary, args={**BASE, **(args or {})}, **{**arguments, **keywords})

    return make


@pytest.fixture
def train_alone(arguments: dict[str, Any], tmp_path: Path) -> Callable[..., GRPOTrainer]:
    """`train_alone(folder, **settings)`: the trainer after a run without a sweep."""

    def train(folder: str, trainer: Any = None, **settings: Any) -> GRPOTrainer:
        given = {**arguments, "model": copy.deepcopy(arguments["model"]), **(trainer or {})}
        alone = GRPOTrainer(**given, args=GRPOConfig(**{**BASE, **settings, "output_dir": str(tmp_path / folder)}))
        alone.train()
        alone.save_model(str(tmp_path / folder))
        return alone

    return train


@pytest.fixture
def tools() -> SimpleNamespace:
    """Returns the helper functions of this module."""
    functions = (logs, equal_files, letters_reward, assert_same, assert_arms_equal_runs_alone, wait_for_steps)
    named = {function.__name__: function for function in functions}
    return SimpleNamespace(**named, base=BASE, rates=RATES, halving=HALVING)


@pytest.fixture
def content(tmp_path, monkeypatch, tools, arguments) -> dict[str, Any]:
    """The content of a file that works, in a folder with everything that it names."""
    arguments["model"].save_pretrained(tmp_path / "base")
    arguments["processing_class"].save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": word}) for word in "abcdefgh"))
    (tmp_path / "sweep_rewards.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    base = {
        **tools.base,
        "model_name_or_path": "base",
        "dataset_name": "rows.jsonl",
        "reward_funcs": ["sweep_rewards.letters"],
    }
    return {"base": base, "output_dir": "out", "vary": {"learning_rate": ["1e-2", "3e-2"]}, "turn_steps": 2}


@pytest.fixture
def sweep_file(content: dict[str, Any]) -> str:
    """The file of a sweep of two arms with turns of a step."""
    Path("sweep.yaml").write_text(yaml.safe_dump({**content, "turn_steps": 1}, sort_keys=False))
    return "sweep.yaml"


@pytest.fixture
def start(sweep_file: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`start(*flags)`: a process of `groupgrad sweep`, which ends with the test."""
    processes = []

    def begin(*flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "groupgrad", "sweep", sweep_file, *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        with Path("errors").open("wb") as errors:
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()
