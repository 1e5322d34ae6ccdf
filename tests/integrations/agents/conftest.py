"""Trainers of programs over a small model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_runs
from datasets import Dataset
from scripted_agents import with_tools

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.types import Rollout


@pytest.fixture
def make_programs(
    tmp_path: Path, make_model: Any, make_tokenizer: Any
) -> Callable[..., tuple[GRPOTrainer, list[Rollout]]]:
    """A trainer of a program, and the list that its training rollouts come to."""

    def make(
        agent: Any, *, budget: int = 200, reward_funcs: Any = None, response_parser: Any = None, **config: Any
    ) -> tuple[GRPOTrainer, list[Rollout]]:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": budget,
            "max_steps": 1,
            "disable_tqdm": True,
            "agent_timeout_s": 60,
        }
        trainer = GRPOTrainer(
            model=make_model(max_position_embeddings=4096),
            processing_class=with_tools(make_tokenizer()),
            agent=agent,
            reward_funcs=reward_funcs,
            response_parser=response_parser,
            args=GRPOConfig(**small_runs.SETTINGS | settings | config),
            train_dataset=Dataset.from_list([{"number": n} for n in range(4)]),
        )
        found: list[Rollout] = []
        trainer.on_experience = lambda experience: found.extend(experience.rollouts)
        return trainer, found

    return make


@pytest.fixture
def play(make_programs: Callable[..., Any]) -> Callable[..., tuple[GRPOTrainer, list[Rollout]]]:
    """The same after training."""

    def run(agent: Any, **settings: Any) -> tuple[GRPOTrainer, list[Rollout]]:
        trainer, found = make_programs(agent, **settings)
        trainer.train()
        return trainer, found

    return run
