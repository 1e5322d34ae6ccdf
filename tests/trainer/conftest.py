"""Small trainers and models for the tests of this folder, and comparisons of two runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from groupgrad import GRPOConfig, GRPOTrainer

PROMPTS = ["a", "bc", "def", "gh", "ij k", "l", "mn", "opqr", "st", "u", "vw", "xyz", "A", "BC", "DE", "F"]
TIMES = ("runtime", "per_second", "step_time", "time/", "tools/wait", "latency_s")


@pytest.fixture(scope="module")
def ranks() -> Any:
    """The module `ranks.py`: runs of two processes."""
    spec = importlib.util.spec_from_file_location("ranks", Path(__file__).with_name("ranks.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def letters_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward that depends on the tokens alone and differs within most groups."""
    return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]


def prompts(count: int = 16) -> Dataset:
    """Returns distinct short prompts, numbered in the column `row`."""
    texts = [PROMPTS[i % len(PROMPTS)] + "!" * (i // len(PROMPTS)) for i in range(count)]
    return Dataset.from_dict({"prompt": texts, "row": list(range(count))})


def weights(model: nn.Module) -> torch.Tensor:
    """Concatenates all parameters, as float64."""
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def relative(first: torch.Tensor, second: torch.Tensor) -> float:
    """Returns |first - second| / |second| in the Euclidean norm."""
    return float((first - second).norm() / second.norm())


def without_times(log_history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the log history without measured times."""
    return [{k: v for k, v in entry.items() if not any(t in k for t in TIMES)} for entry in log_history]


@pytest.fixture
def make_policy(make_model: Callable[..., Qwen3ForCausalLM]) -> Callable[..., Qwen3ForCausalLM]:
    """Builds a small model with larger random weights than usual; a fifth of its vocabulary ends a completion."""

    def make(seed: int = 0, **config: Any) -> Qwen3ForCausalLM:
        model = make_model(seed, **{"initializer_range": 0.15, **config})
        model.generation_config.eos_token_id = [1, *range(4, 24)]  # pyright: ignore[reportOptionalMemberAccess]
        return model

    return make


@pytest.fixture
def make_trainer(
    make_policy: Callable[..., Qwen3ForCausalLM], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Callable[..., GRPOTrainer]:
    """`make_trainer(model=..., reward_funcs=..., **config fields)`: a trainer of a few fast steps on a CPU."""

    def make(
        *,
        model: Any = None,
        reward_funcs: Any = letters_reward,
        train_dataset: Any = None,
        trainer: dict[str, Any] | None = None,
        **settings: Any,
    ) -> GRPOTrainer:
        config: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "max_steps": 3,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 6,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            **settings,
        }
        return GRPOTrainer(
            model=make_policy() if model is None else model,
            reward_funcs=reward_funcs,
            args=GRPOConfig(**config),
            train_dataset=prompts() if train_dataset is None else train_dataset,
            **{"processing_class": tokenizer, **(trainer or {})},
        )

    return make


STATEFUL = {
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "entropy_target": 5.0,
    "entropy_coef_delta": 0.05,
    "gradient_accumulation_steps": 2,
}
"""Settings of a run in which everything that a checkpoint holds changes with each step."""


@pytest.fixture
def tools() -> SimpleNamespace:
    """Returns the helper functions of this module."""
    return SimpleNamespace(
        letters_reward=letters_reward,
        prompts=prompts,
        weights=weights,
        relative=relative,
        without_times=without_times,
        stateful=STATEFUL,
    )
