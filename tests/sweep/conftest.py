"""Small sweeps of a few fast steps, and the same runs made alone."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file

from groupgrad import GRPOConfig, GRPOTrainer, Sweep
from groupgrad.run_folder.run_files import read_lines

WORDS = ["a", "bc", "def", "gh", "ij k", "l", "mn", "opqr", "st", "u", "vw", "xyz", "A", "BC", "DE", "F"]
TIMES = ("runtime", "per_second", "step_time", "time/", "latency_s")

REWARD = """
def letters(completion_ids, **kwargs):
    return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]
"""

BASE: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "max_steps": 6,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
}
HALVING = {"first": 0.34}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def letters_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward that depends on the tokens alone and differs within most groups."""
    return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]


def equal_files(first: Path, second: Path, name: str = "model.safetensors") -> bool:
    """True if two folders hold the same weights, bit for bit."""
    one, other = load_file(first / name), load_file(second / name)
    return set(one) == set(other) and all(torch.equal(one[key], other[key]) for key in one)


def logs(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run folder without measured times and without the summary of the end."""
    rows = [row for row in read_lines(path / "metrics.jsonl") if "train_runtime" not in row]
    return [{k: v for k, v in row.items() if k != "time" and not any(t in k for t in TIMES)} for row in rows]


def trainer_arguments(make_model: Callable[..., Any], tokenizer: Any) -> dict[str, Any]:
    """Arguments of a trainer, whose model ends a fifth of its completions at each token."""
    model = make_model(0, initializer_range=0.15)
    model.generation_config.eos_token_id = [1, *range(4, 24)]
    return {
        "model": model,
        "reward_funcs": [letters_reward],
        "train_dataset": Dataset.from_dict({"prompt": WORDS}),
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
    return SimpleNamespace(
        logs=logs, equal_files=equal_files, letters_reward=letters_reward, base=BASE, rates=RATES, halving=HALVING
    )


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
