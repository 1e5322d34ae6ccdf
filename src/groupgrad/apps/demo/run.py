"""Trains the model of a demo with GRPO, and shows its answers to held-out questions before and after.

`groupgrad demo --tiny` needs no network and takes minutes on two cores:

1. Make a small base model: a Qwen3-architecture model and its tokenizer, trained on careless demonstrations of a sum
   written in steps (`groupgrad.apps.demo.task`). It has seen how it is done, but mostly guesses.
2. Train it with GRPO: one reward for a right answer, one for the format. Held-out prompts measure it before and after.

The accuracy that it promises is `PROMISE`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils import logging as transformers_logging

from groupgrad.activity import Timings
from groupgrad.apps.demo.task import (
    MAX_COMPLETION_LENGTH,
    correctness_reward,
    format_reward,
    make_model,
    make_splits,
    make_tokenizer,
    warm_up,
)
from groupgrad.config import GRPOConfig
from groupgrad.trainer import GRPOTrainer

GRPO_STEPS, WARM_UP_STEPS = 200, 800

ON_A_CPU: dict[str, Any] = {
    "beta": 0.0,
    "log_completions": True,
    "num_completions_to_print": 0,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}
"""Settings that the demo of the tiny model and the demo of the pretrained one share."""

BASE = "base"
"""Folder in that of the run with the model that GRPO starts from, for a replay."""

DRAWS = importlib.util.find_spec("matplotlib") is not None
"""True if a picture of the rewards is drawn."""


class Promise(NamedTuple):
    """The accuracy on held-out questions that a trained model must have at least."""

    accuracy: float
    times: float
    """The accuracy must be at least this many times that before training."""

    def __str__(self) -> str:
        return f"to at least {self.accuracy:.0%}, and {self.times:g} times what it was"


PROMISE = Promise(0.85, 2)


class _KeepBase(TrainerCallback):
    """Saves the model that GRPO starts from, once the run has its folder to itself."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Writes `BASE`."""
        model.save_pretrained(Path(args.output_dir) / BASE)


def run(options: argparse.Namespace, command: dict[str, Any] | None = None) -> int:
    """Runs the demo and reports; 0 if the promised accuracy was met, else 1.

    `options` are `seed`, `output_dir`, `warm_up_steps` and `grpo_steps`. The run records `command`, its command line.
    """
    timings = Timings()
    transformers_logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.seed)
    print(f"1. Base model: {model.num_parameters():,} parameters, trained on careless demonstrations")
    with timings.phase("warm-up"):
        problems = make_splits(options.seed).warm_up
        warm_up(model, tokenizer, problems, num_steps=options.warm_up_steps, seed=options.seed)
    trainer = make_trainer(options, model)
    trainer.add_callback(_KeepBase)
    return train_and_report(trainer, command, timings, PROMISE)


def make_trainer(options: argparse.Namespace, model: str | PreTrainedModel) -> GRPOTrainer:
    """The trainer of a model that was warmed up, or of the folder that it was saved in."""
    splits = make_splits(options.seed)
    questions, held_out = (
        Dataset.from_list([problem.row() for problem in part]) for part in (splits.grpo, splits.held_out)
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=[correctness_reward, format_reward],
        args=make_config(options, **before_and_after(options, len(held_out))),
        train_dataset=questions,
        eval_dataset=held_out,
        processing_class=make_tokenizer(),
    )


def make_config(options: argparse.Namespace, **more: Any) -> GRPOConfig:
    """16 prompts a step, 16 completions each, every sample used once: plain on-policy GRPO. `more`: further fields."""
    return GRPOConfig(
        output_dir=options.output_dir,
        seed=options.seed,
        max_steps=options.grpo_steps,
        per_device_train_batch_size=256,
        num_generations=16,
        max_completion_length=MAX_COMPLETION_LENGTH,
        learning_rate=6e-4,
        adam_beta2=0.98,  # gradients shrink quickly once the format is learned; a long memory would hold the steps back
        logging_steps=5,
        **ON_A_CPU,
        **more,
    )


def before_and_after(options: argparse.Namespace, num_questions: int) -> dict[str, Any]:
    """Settings that answer each held-out question once before training and once after."""
    return {
        "eval_on_start": True,
        "eval_strategy": "steps",
        "eval_steps": options.grpo_steps,
        "per_device_eval_batch_size": num_questions,
        "num_generations_eval": 1,
    }


def train_and_report(trainer: GRPOTrainer, command: dict[str, Any] | None, timings: Timings, promise: Promise) -> int:
    """Trains, saves the model and prints what came of it; 0 if the promise was met, else 1.

    The first reward function is 1 for a right answer, else 0.
    """
    args, trainer.recorder.command = trainer.args, command
    print(f"\n2. GRPO: {args.max_steps} steps of {args.per_device_train_batch_size} answers, and held-out questions")
    with timings.phase("GRPO"):
        trainer.train()
    history, output_dir = trainer.state.log_history, Path(str(args.output_dir))
    print(f"\n{seconds_of_a_step(history)}\n{mismatch(history)}")
    with timings.phase("saving"):
        trainer.save_model(str(output_dir))
    if DRAWS:
        plot_rewards(history, output_dir / "rewards.png")
    before, after = (answers(output_dir, step, trainer.rewards.names[0]) for step in (0, args.max_steps))
    return report(before, after, timings, output_dir, promise)


def plot_rewards(log_history: list[dict[str, float]], path: Path) -> None:
    """Draws the rewards of training and evaluation and the lengths of completions over the steps, as a PNG."""
    from matplotlib.figure import Figure

    events = pd.DataFrame(log_history).set_index("step")
    figure = Figure(figsize=(8.0, 5.6), dpi=150, layout="constrained")
    rewards, lengths = figure.subplots(2, 1, sharex=True, height_ratios=[5, 3])
    for axis, key, style, label in (
        (rewards, "reward", "-", "training"),
        (rewards, "eval_reward", "o--", "held-out questions"),
        (lengths, "completions/mean_length", "-", "training"),
    ):
        if key in events:
            points = events[key].dropna()
            axis.plot(points.index, points, style, label=label)
    rewards.set_ylabel("mean reward")
    rewards.legend()
    lengths.set_ylabel("tokens of a completion")
    lengths.set_xlabel("optimizer step")
    figure.savefig(path)


def answers(output_dir: Path, step: int, reward: str) -> pd.DataFrame:
    """Reads the answers to the held-out questions at a step: `question`, `answer` and `right` (0 or 1)."""
    table = pd.read_parquet(output_dir / "completions" / f"eval_{step:05d}.parquet")
    texts = {
        name: [value if isinstance(value, str) else value[-1]["content"] for value in table[column]]
        for name, column in (("question", "prompt"), ("answer", "completion"))
    }
    return pd.DataFrame({**texts, "right": table[reward]})


def seconds_of_a_step(log_history: list[dict[str, float]]) -> str:
    """Prints the phases of a GRPO step in seconds, averaged over the run."""
    logs = [event for event in log_history if "step_time" in event]
    parts = {key: sum(event[key] for event in logs) / len(logs) for key in logs[0] if key.startswith("time/")}
    return "A step: " + ", ".join(f"{key.removeprefix('time/')} {seconds:.3f} s" for key, seconds in parts.items())


def mismatch(log_history: list[dict[str, float]]) -> str:
    """Prints the largest gap between the log-probs of sampling and of training in each log entry."""
    found = [event["sampling/logp_mismatch"] for event in log_history if "sampling/logp_mismatch" in event]
    numbers = f"{sum(found) / len(found):.1e} on average, {max(found):.1e} at most" if found else "not measured"
    return f"Sampled and trained log-probs, the largest difference of a log entry's tokens: {numbers}"


def report(before: pd.DataFrame, after: pd.DataFrame, timings: Timings, output_dir: Path, promise: Promise) -> int:
    """Prints before and after, the seconds of each phase and the files; 0 if the promise was met, else 1."""
    first, last = before["right"].mean(), after["right"].mean()
    print(f"\n{len(before)} held-out questions, one answer each, sampled at temperature 1")
    print(f"  accuracy  before {first:.1%}, after {last:.1%}\n\nThe first five of them:")
    for row, trained in zip(before.head(5).itertuples(), after.head(5).itertuples()):
        lines = [" ".join(str(text).split()) for text in (row.question, row.answer, trained.answer)]
        print("  {}\n    before  {}\n    after   {}".format(*lines))
    seconds = timings.take()
    times = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items())
    print(f"\nTime: {times}; {sum(seconds.values()):.0f} s in all")
    picture = "rewards.png, " if DRAWS else ""
    print(f"Files in {output_dir}/: the model and tokenizer (from_pretrained), {picture}metrics.jsonl, rollouts/")
    if not DRAWS:
        print("(`pip install 'groupgrad[plot]'` adds the picture of the rewards)")
    print(f"Look at them: groupgrad view {output_dir}")
    if last < promise.accuracy or last < promise.times * first:
        print(f"Missed: accuracy should go {promise}.")
        return 1
    print(f"Met: accuracy went {promise}.")
    return 0
