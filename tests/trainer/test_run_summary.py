"""The lines at the start of a run say which columns of the data set are used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.trainer.run_summary import columns_in_words


def names_answer(completions: list[str], answer: list[str]) -> list[float]:
    return [0.0] * len(completions)


def takes_all(completions: list[str], level: Any = None, **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def takes_an_alias(responses: list[str], ground_truths: list[str]) -> list[float]:
    return [0.0] * len(responses)


def words(functions: list[Any], columns: str, environments: Any = None) -> str:
    dataset = Dataset.from_dict({name: ["x"] for name in columns.split()})
    parts = SimpleNamespace(environments=environments)
    return columns_in_words(
        SimpleNamespace(train_dataset=dataset, rollout_components=parts, rewards=RewardRunner(functions))
    )


@pytest.mark.parametrize(
    ("functions", "columns", "text"),
    [
        ([names_answer], "prompt answer", "prompts are made of prompt; reward functions name answer"),
        (
            [names_answer],
            "prompt answer id",
            "prompts are made of prompt; reward functions name answer; nothing uses id",
        ),
        (
            [takes_all],
            "id prompt",
            "prompts are made of prompt; reward functions name no other, and get id by **kwargs",
        ),
        (
            [names_answer, takes_all],
            "prompt image level answer id",
            "prompts are made of prompt, image; reward functions name level, answer, and get id by **kwargs",
        ),
        (
            [takes_all],
            "prompt completion",
            "prompts are made of prompt; reward functions name no other; nothing uses completion",
        ),
        (
            [takes_an_alias],
            "prompt solution id",
            "prompts are made of prompt; reward functions name solution; nothing uses id",
        ),
    ],
)
def test_each_column_is_used_or_named_as_unused(functions: list[Any], columns: str, text: str) -> None:
    assert words(functions, columns) == text


def test_environments_get_whole_rows() -> None:
    text = "environments get all; prompts are made of prompt; reward functions name answer"
    assert words([names_answer], "prompt answer id", environments=object()) == text


def test_columns_that_a_function_makes_are_not_read_for_a_line() -> None:
    def fail(rows: Any) -> Any:
        raise AssertionError("a row was read")

    dataset = Dataset.from_dict({"prompt": ["x"]}).with_transform(fail)
    trainer = SimpleNamespace(train_dataset=dataset, rollout_components=SimpleNamespace(environments=None))
    assert columns_in_words(trainer) == "they are made while rows are read"
