"""The demo's task: its problems, pupils, grades and tokenizer are right, and its base model begins to learn."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from groupgrad.apps.cli.main import main
from groupgrad.apps.demo import run as demo
from groupgrad.apps.demo import task


@pytest.fixture(scope="module")
def tokenizer():
    return task.make_tokenizer()


def test_splits_share_no_prompt_cover_all_problems_and_follow_the_seed():
    splits = task.make_splits(1)
    parts = [{p.prompt for p in part} for part in (splits.warm_up, splits.grpo, splits.held_out)]
    assert [len(part) for part in parts] == [9**4 - 1024 - 512, 1024, 512]
    assert len(set.union(*parts)) == 9**4
    assert task.make_splits(1) == splits
    assert task.make_splits(2).held_out != splits.held_out


@pytest.mark.parametrize(
    ("habit", "right_share", "format_share"),
    [
        ("careful", (1.0, 1.0), 1.0),
        ("slip", (0.0, 0.0), 1.0),
        ("untagged", (0.0, 0.0), 0.0),
        ("guess", (0.14, 0.26), 0.0),  # one guess in five drops no digit
    ],
)
def test_habits_earn_what_they_should(habit, right_share, format_share):
    rng = random.Random(0)
    problems = rng.sample(task.make_splits(0).warm_up, 400)
    texts = [task.demonstrate(problem, habit, rng) for problem in problems]
    right = task.correctness_reward(texts, [p.solution for p in problems])
    assert right_share[0] <= sum(right) / 400 <= right_share[1]
    assert sum(task.format_reward(texts)) / 400 == format_share


@pytest.mark.parametrize(
    ("text", "right", "formatted"),
    [
        ("<think>3+5=8 8+7=15 15+2=17</think><answer>17</answer>", 1.0, 1.0),
        ("<think>3+5=8 8+7=15 15+2=18</think><answer>18</answer>", 0.0, 1.0),
        ("<answer>17</answer>", 1.0, 0.0),
        ("<think></think><answer>17</answer>", 1.0, 0.0),
        ("<think>3+5=8</think>17", 0.0, 0.0),
        ("<answer>17</answer><answer>16</answer>", 0.0, 0.0),
        ("<think>3</think><answer>17</answer>5", 1.0, 0.0),
        ("<answer>17", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_rewards_by_hand(text, right, formatted):
    assert task.correctness_reward([text], [17]) == [right]
    assert task.format_reward([text]) == [formatted]


def test_tokenizer_round_trip_and_special_tokens(tokenizer, tmp_path):
    problem = task.Problem((3, 5, 7, 2))
    assert problem.row() == {"prompt": "3+5+7+2=", "solution": 17}
    text = "3+5+7+2=" + task.demonstrate(problem, "careful", random.Random(0))
    assert text == "3+5+7+2=<think>3+5=8 8+7=15 15+2=17</think><answer>17</answer>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 8 + 26 < 8 + task.MAX_COMPLETION_LENGTH
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(text + task.EOS)["input_ids"] == [*ids, tokenizer.eos_token_id]
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again(text)["input_ids"] == ids
    assert again.decode(ids) == text
    assert (again.pad_token, again.eos_token, again.padding_side) == (task.PAD, task.EOS, "left")


def test_demonstration_batches_label_only_the_completion(tokenizer):
    problems = task.make_splits(0).warm_up[:50]
    batch = next(task.demonstration_batches(problems, tokenizer, batch_size=16, seed=3))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert (batch["labels"][:, :8] == -100).all()
    labelled = batch["labels"] != -100
    assert torch.equal(labelled[:, 8:], batch["attention_mask"][:, 8:].bool())
    for row, keep in zip(batch["labels"], labelled):
        assert row[keep][-1] == tokenizer.eos_token_id
        assert (row[keep] == tokenizer.eos_token_id).sum() == 1


def test_warm_up_learns_the_format_first(tokenizer):
    model = task.make_model(tokenizer, seed=0)
    losses = task.warm_up(model, tokenizer, task.make_splits(0).warm_up, num_steps=30, batch_size=16)
    assert len(losses) == 30
    assert losses[0] == pytest.approx(torch.log(torch.tensor(21.0)).item(), abs=0.3)  # an untrained model knows nothing
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_demo_runs_and_writes_what_it_promises(tmp_path, capsys):
    """A run that is far too short to reach the target: it says so, fails, and leaves every file behind."""
    arguments = ["--tiny", "--output_dir", str(tmp_path), "--warm_up_steps", "1", "--grpo_steps", "1"]
    assert main(["demo", *arguments]) == 1
    shown = capsys.readouterr().out
    assert "512 held-out questions, one answer each" in shown and "Missed: accuracy should go to at least 85%" in shown
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(0 <= event.get("reward", -1) <= 2 for event in events)
    assert (tmp_path / "rewards.png").is_file() == demo.DRAWS
    assert not demo.DRAWS or (tmp_path / "rewards.png").stat().st_size > 10_000
    tables = [demo.answers(tmp_path, step, "correctness_reward") for step in (0, 1)]
    assert [list(table["question"]) for table in tables] == [[p.prompt for p in task.make_splits(0).held_out]] * 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == 132_672


def test_seconds_of_a_step() -> None:
    history = [
        {"step_time": 1.0, "time/sampling": 0.5, "time/training": 0.25},
        {"eval_reward": 1.0},
        {"step_time": 2.0, "time/sampling": 1.5, "time/training": 0.75},
    ]
    assert demo.seconds_of_a_step(history) == "A step: sampling 1.000 s, training 0.500 s"


def test_the_mismatch_is_that_of_all_log_entries() -> None:
    entries = [{"sampling/logp_mismatch": 1e-5}, {"loss": 1.0}, {"sampling/logp_mismatch": 3e-5}]
    assert demo.mismatch(entries).endswith(": 2.0e-05 on average, 3.0e-05 at most")
    assert demo.mismatch([{"loss": 1.0}]).endswith(": not measured")
