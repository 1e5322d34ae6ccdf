"""`reuse_environments`: how many environments a training makes, and when it closes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from scripted_agents import with_tools

from groupgrad import GRPOConfig, GRPOTrainer

ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Count to {i}."}]} for i in range(8)])


class Counted:
    """Counts its instances and notes, for each, how often it was reset and closed."""

    made: list[Counted]

    def __init__(self) -> None:
        self.resets, self.closes = 0, 0
        Counted.made.append(self)

    def reset(self, **row: Any) -> None:
        self.resets += 1

    def count(self) -> int:
        """Counts."""
        return self.resets

    def close(self) -> None:
        self.closes += 1


def is_open(environments: list[Counted], completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that needs the environments as the rollouts have left them."""
    assert all(environment.closes == 0 for environment in environments)
    return [float(len(str(completion)) % 5) for completion in completions]


def train(tokenizer: Any, make_model: Any, folder: Path, factory: Any = Counted, **settings: Any) -> None:
    Counted.made = []
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4, "max_steps": 3}
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    GRPOTrainer(
        model=make_model(max_position_embeddings=2048),
        reward_funcs=is_open,
        args=GRPOConfig(output_dir=str(folder), **sizes, **quiet, **settings),
        processing_class=with_tools(tokenizer),
        train_dataset=ROWS,
        environment_factory=factory,
    ).train()


class WithoutClose(Counted):
    close = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("factory", "reuse", "num_made"),
    [
        (Counted, True, 8),
        (Counted, False, 24),
        (Counted, None, 24),  # by default those that can be closed serve one rollout
        (WithoutClose, None, 8),  # and those that cannot are reused
    ],
)
def test_how_often_an_environment_serves(tokenizer: Any, make_model: Any, tmp_path: Path, factory, reuse, num_made):
    train(tokenizer, make_model, tmp_path, factory, reuse_environments=reuse)
    assert [made.resets for made in Counted.made] == [24 // num_made] * num_made
    assert factory is WithoutClose or [made.closes for made in Counted.made] == [1] * num_made


def test_the_option_is_warned_of_where_there_are_no_environments(
    tokenizer: Any, make_model: Any, tmp_path: Path
) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", reuse_environments=False)
    with pytest.warns(UserWarning, match="reuse_environments has no effect: there are no tools"):
        GRPOTrainer(
            model=make_model(),
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        )
