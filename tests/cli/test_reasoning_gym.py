"""`reasoning_gym:TASK` as the data set of every command, with the reward that it brings along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: `make check` installs it")

from groupgrad.apps.cli.arguments import TaskArguments
from groupgrad.apps.cli.dataset import load_splits
from groupgrad.apps.cli.main import main
from groupgrad.apps.cli.scripts import DatasetMixtureConfig, get_dataset
from groupgrad.apps.cli.train import load_rewards
from groupgrad.integrations.reasoning_gym import reasoning_gym_reward
from groupgrad.rewards import think_format_reward

COMPOSITE = {"datasets": [{"name": "chain_sum", "weight": 2, "config": {"max_terms": 2}}, {"name": "rush_hour"}]}
SETTINGS = {
    "dataset_name": "reasoning_gym:chain_sum",
    "dataset_config": {"size": 40, "test_size": 6, "max_terms": 2, "max_digits": 2},
    "system_prompt": "Use <answer> tags.",
    "max_steps": 4,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "output_dir": "out",
}


@pytest.fixture
def write(work: Path, make_model: Any) -> Any:
    """Writes the settings of a small run into a file of the working folder."""
    make_model(max_position_embeddings=2048).save_pretrained(work / "model")
    (work / "counts.py").write_text(
        "def count(completions, **kwargs):\n    return [float(len(message[0]['content'])) for message in completions]\n"
    )

    def write(name: str = "run.yaml", **changes: Any) -> str:
        content = {"model_name_or_path": "model", **SETTINGS, **changes}
        Path(name).write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return name

    return write


def logged(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_has_the_reward_of_its_task_and_held_out_rows(write: Any) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "dataset_config": {**COMPOSITE, "size": 40}}
    assert main(["train", "--config", write(**changes, dataset_name="reasoning_gym:composite")]) == 0
    events = {key: value for event in logged("out") for key, value in event.items()}
    # The verifier of rush_hour gives 0.01 for any text.
    assert 0 <= events["rewards/reasoning_gym_reward/mean"] < 0.1 and "reasoning_gym/chain_sum" in events
    assert events["reasoning_gym/tagged"] == 0.0 and 0 <= events["eval_reward"] < 0.1


def test_a_resumed_run_equals_an_uninterrupted_one_and_is_replayed(write: Any, capsys: Any) -> None:
    rewards = {"reward_funcs": ["reasoning_gym_reward", "counts.count"], "save_steps": 2}
    file = write(**rewards)
    assert main(["train", "--config", file]) == 0
    assert main(["train", "--config", file, "--output_dir", "other"]) == 0
    resumed = ["--resume_from_checkpoint", "other/checkpoint-2", "--output_dir", "other"]
    assert main(["train", "--config", file, *resumed]) == 0
    one, two = (load_file(Path(folder) / "model.safetensors") for folder in ("out", "other"))
    assert all((one[name] == two[name]).all() for name in one)
    assert main(["replay", "out", "--step", "3"]) == 0
    assert "0 bits differ." in capsys.readouterr().out


def test_check_and_plan_take_it(write: Any, capsys: Any) -> None:
    file = write()
    assert main(["check", "--config", file, "--prompts", "2", "--set", "dataset_config.max_digits=1"]) in (0, 1)
    shown = " ".join(capsys.readouterr().out.split())
    assert "40 prompts to train on" in shown and "reward functions name question, reasoning_gym" in shown
    assert main(["plan", "--config", file, "--cpu"]) == 0
    assert main(["train", "--config", write(dataset_name="reasoning_gym:chain_sun"), "--dry-run"]) == 2
    assert "'chain_sun' not registered" in capsys.readouterr().err
    assert main(["check", "--config", write(dataset_config={"max_term": 2})]) == 2
    assert "unexpected keyword argument 'max_term'" in capsys.readouterr().err


def test_a_sweep_over_the_difficulty(write: Any) -> None:
    write()
    base = yaml.safe_load(Path("run.yaml").read_text()) | {"max_steps": 1}
    del base["output_dir"]
    sweep = {"output_dir": "swept", "base": base, "vary": {"dataset_config.max_digits": [1, 2]}}
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    assert main(["sweep", "sweep.yaml"]) == 0
    arms = sorted(Path("swept/arms").iterdir())
    assert [yaml.safe_load((arm / "run.yaml").read_text())["dataset_config"]["max_digits"] for arm in arms] == [1, 2]
    assert all("rewards/reasoning_gym_reward/mean" in logged(str(arm))[0] for arm in arms)


def test_other_rewards_can_be_named() -> None:
    def rewards(**settings: Any) -> list[Any]:
        return load_rewards(TaskArguments(dataset_name="reasoning_gym:chain_sum", **settings))

    assert rewards() == [reasoning_gym_reward]
    both = ["reasoning_gym_reward", "think_format_reward"]
    assert rewards(reward_funcs=both) == [reasoning_gym_reward, think_format_reward]
    assert rewards(reward_model_name_or_path="judge") == ["judge"]
    with pytest.raises(ValueError, match="did you mean 'reasoning_gym_reward'"):
        rewards(reward_funcs=["reasoning_gym_rewards"])
    with pytest.raises(ValueError, match="no reward is given"):
        load_rewards(TaskArguments(dataset_name="rows.jsonl"))


def test_rows_from_a_stream_and_of_a_test_set_of_another_task() -> None:
    script = TaskArguments(
        dataset_name="reasoning_gym:chain_sum",
        dataset_test_name="reasoning_gym:leg_counting",
        dataset_config="{size: 3, test_size: 2}",
        dataset_streaming=True,
        system_prompt="direct",
    )
    train, test = load_splits(script, evaluate=True)
    assert [row["task"] for row in train] == ["chain_sum"] * 3 and [row["task"] for row in test] == ["leg_counting"] * 2
    assert next(iter(train))["prompt"][0]["content"].startswith("Answer the question directly.")
    with pytest.raises(ValueError, match="is a mapping, which only reasoning_gym:TASK takes"):
        load_splits(TaskArguments(dataset_name="rows.jsonl", dataset_config={"size": 3}), evaluate=False)


def test_the_example_makes_its_rows_and_held_out_ones() -> None:
    settings = yaml.safe_load((Path(__file__).parents[2] / "examples" / "reasoning_gym.yaml").read_text())
    fields = {name: settings[name] for name in ("dataset_name", "dataset_config", "system_prompt")}
    train, test = load_splits(TaskArguments(**fields), evaluate=True)
    assert len(train) == 60 and len(test) >= 60 and not set(train["question"]) & set(test["question"])
    assert set(train["task"]) == {"products"}


def test_tasks_are_parts_of_a_mixture() -> None:
    parts = [
        {"path": "reasoning_gym:chain_sum", "name": {"size": 4, "max_terms": 2}},
        {"path": "reasoning_gym:rush_hour", "name": {"size": 2}},
    ]
    rows = get_dataset(DatasetMixtureConfig(parts))["train"]  # pyright: ignore
    assert rows["task"][:] == ["chain_sum"] * 4 + ["rush_hour"] * 2
    answers = [f"<answer>{answer}</answer>" for answer in rows["answer"]]
    assert reasoning_gym_reward(answers, rows["question"][:], rows["reasoning_gym"][:])[:4] == [1.0] * 4
