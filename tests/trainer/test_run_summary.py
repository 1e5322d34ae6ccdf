"""The lines at the start of a run say which columns of the data set are used, and what half precision costs."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from base_fixtures import make_model
from datasets import Dataset

from groupgrad.apps.check.data_findings import data_findings
from groupgrad.kernels import library, status
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.trainer.run_summary import columns_in_words

needs_kernels = pytest.mark.skipif(library() is None, reason=status())


def names_answer(completions: list[str], answer: list[str]) -> list[float]:
    return [0.0] * len(completions)


def takes_all(completions: list[str], level: Any = None, **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def takes_an_alias(responses: list[str], ground_truths: list[str]) -> list[float]:
    return [0.0] * len(responses)


def words(functions: list[Any], columns: str, environments: Any = None, program: Any = None) -> str:
    dataset = Dataset.from_dict({name: ["x"] for name in columns.split()})
    parts = SimpleNamespace(environments=environments, program=program)
    return columns_in_words(
        SimpleNamespace(train_dataset=dataset, rollout_components=parts, rewards=RewardRunner(functions))
    )


@pytest.mark.parametrize(
    ("functions", "columns", "text"),
    [
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
    assert words([names_answer], "prompt answer id", program=print) == text.replace(
        "environments get", "the agent gets"
    )


def test_columns_that_a_function_makes_are_not_read_for_a_line() -> None:
    def fail(rows: Any) -> Any:
        raise AssertionError("a row was read")

    dataset = Dataset.from_dict({"prompt": ["x"]}).with_transform(fail)
    trainer = SimpleNamespace(train_dataset=dataset, rollout_components=SimpleNamespace(environments=None))
    assert columns_in_words(trainer) == "they are made while rows are read"


def test_the_first_batch_of_a_process_tells_how_decode_steps_run(make_trainer: Any, capfd: Any, tmp_path: Any) -> None:
    """The trial at the start may take another path. A batch that comes from a checkpoint names none."""
    settings = {"max_steps": 4, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}

    def train(checkpoint: str | None) -> tuple[list[str], dict[str, Any]]:
        """Lines up to the first behind the decoding line, and the record of how the run sampled."""
        trainer = make_trainer(**settings)
        assert not trainer.engine.path.startswith("modules")
        trainer.model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        capfd.readouterr()
        trainer.train(checkpoint)
        lines = [line for line in capfd.readouterr().out.splitlines() if re.match("[a-z]", line)]
        config = json.loads((tmp_path / "run" / "run_config.json").read_text())
        return lines[: next(i for i, line in enumerate(lines) if line.startswith("decoding")) + 2], config["sampling"]

    lines, record = train(None)
    assert [line.partition("  ")[0] for line in lines[:-1]] == [
        "columns", "batch", "prompts", "ending", "old log-probs", "decoding"
    ]  # fmt: skip
    assert lines[-2].startswith("decoding       native engine, steps run modules") and lines[-1].startswith("step 1 ")
    assert re.fullmatch("old log-probs  those of sampling, from which those of a forward .* nats a token", lines[-3])
    assert 0 <= record.pop("logp_gap") < 1e-3
    assert record == {"engine": "native", "path": lines[-2].partition("run ")[2], "old_logprobs": "sampling"}
    resumed, record = train(str(tmp_path / "run" / "checkpoint-1"))
    assert resumed[:5] == lines[:5] and resumed[5].startswith("step 2 ")
    assert resumed[6] == lines[-2] and resumed[7].startswith("step 3 ")
    assert record["path"].startswith("modules")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert "path" not in {event["event"] for event in events}


@pytest.mark.parametrize(
    ("dtype", "settings", "line"),
    [
        (
            "float16",
            {},
            "weights in float16: .* without the compiled kernels .* Load the model with dtype='float32' if",
        ),
        pytest.param("bfloat16", {}, None, marks=needs_kernels),
        ("float32", {"bf16": True}, "bf16=True: .* Set bf16=False if memory allows"),
        ("float32", {}, None),
    ],
)
def test_half_precision_on_a_cpu_is_told(train: Any, capfd: Any, dtype: str, settings: Any, line: str | None) -> None:
    """At the start of a run, as a line; by `groupgrad check`, as a warning."""
    trainer = train(model=make_model().to(getattr(torch, dtype)), max_steps=1, learning_rate=0.0, **settings)
    shown = capfd.readouterr()
    printed = re.search("precision +(.*)", shown.out + shown.err)
    found = [finding.status for finding in data_findings(trainer) if finding.topic == "precision"]
    assert found == ([] if line is None else ["warning"])
    assert printed is None if line is None else printed is not None and re.match(line, printed[1])
