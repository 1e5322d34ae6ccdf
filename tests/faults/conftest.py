"""A small run and its checkpoints, broken on purpose by the tests of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from scripted_agents import with_tools

from groupgrad import GRPOConfig, GRPOTrainer

_SPEC = importlib.util.spec_from_file_location("base", Path(__file__).parents[1] / "conftest.py")
assert _SPEC is not None and _SPEC.loader is not None
BASE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(BASE)


def letters_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward that depends on the tokens alone."""
    return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]


def add(number: int) -> int:
    """Adds one.

    Args:
        number: What to add to.
    """
    return number + 1


def read_call(text: str, ids: list[int]) -> dict[str, Any]:
    """Makes every other turn a tool call."""
    call = {"name": "add", "arguments": {"number": len(ids)}}
    return {"role": "assistant", "content": text, "tool_calls": [call] if ids[0] % 2 else []}


def make_trainer(output_dir: Path, *, reward: Any = letters_reward, peft: Any = None, **settings: Any) -> GRPOTrainer:
    """A trainer of a few fast steps, equal for equal settings, that saves each step."""
    torch.set_num_threads(1)
    model = BASE.make_model(0, initializer_range=0.15)
    model.generation_config.eos_token_id = [1, *range(4, 24)]
    config: dict[str, Any] = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
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
    stream, tokenizer, extra = config.pop("stream", False), BASE.make_tokenizer(), {}
    dataset = Dataset.from_dict({"prompt": [f"{letter}!" for letter in "abcdefghijklmnop"]})
    if config.pop("tools", False):
        tokenizer, extra = with_tools(tokenizer), {"tools": [add], "response_parser": read_call}
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=dataset.to_iterable_dataset() if stream else dataset,
        processing_class=tokenizer,
        peft_config=peft,
        **extra,
    )


def weights(trainer: GRPOTrainer) -> torch.Tensor:
    """All parameters, one after the other."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.fixture(scope="session")
def new_trainer() -> Callable[..., GRPOTrainer]:
    """`new_trainer(output_dir, **settings)`."""
    return make_trainer


@pytest.fixture(scope="session")
def weights_of() -> Callable[[GRPOTrainer], torch.Tensor]:
    """`weights_of(trainer)`: all parameters, one after the other."""
    return weights


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GRPOTrainer]:
    """The folder and the trainer of a run of three steps that nothing disturbed, with three checkpoints."""
    folder = tmp_path_factory.mktemp("straight")
    trainer = make_trainer(folder)
    trainer.train()
    return folder, trainer
