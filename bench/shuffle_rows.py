"""Measures learning with `shuffle_rows` "groups" and "rows" on two small tasks.

`python bench/shuffle_rows.py --output bench/RESULTS-shuffle-rows.md` trains each task with both settings and several
seeds and writes the table. A generation batch serves four optimizer steps. Runs offline, in minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.utils import logging as transformers_logging

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.demo import task as tiny_task

SETTINGS = ("groups", "rows")
ROWS_A_STEP, GROUP, STEPS_A_BATCH = 32, 8, 4


@dataclass(slots=True, frozen=True)
class Task:
    """A model to start from, and what it is trained on."""

    name: str
    model: Any
    tokenizer: Any
    rows: list[dict[str, Any]]
    reward: Callable[..., list[float]]
    max_completion_length: int
    learning_rate: float
    num_steps: int


def sums(num_steps: int) -> Task:
    """Adding four digits: sparse reward, from a model that has seen careless demonstrations."""
    splits, tokenizer = tiny_task.make_splits(0), tiny_task.make_tokenizer()
    model = tiny_task.make_model(tokenizer, 0)
    tiny_task.warm_up(model, tokenizer, splits.warm_up, num_steps=400)
    rows = [problem.row() for problem in splits.grpo]
    reward = tiny_task.correctness_reward
    return Task("sums", model, tokenizer, rows, reward, tiny_task.MAX_COMPLETION_LENGTH, 3e-4, num_steps)


def digits(num_steps: int) -> Task:
    """Repeating the prompt's two digits in turn: dense reward, from random weights."""
    tokenizer = tiny_task.make_tokenizer()
    model = tiny_task.make_model(tokenizer, 1)
    rows = [{"prompt": f"{a}{b}"} for a in string.digits for b in string.digits if a != b]
    return Task("digits", model, tokenizer, rows, repeats, 8, 3e-3, num_steps)


def repeats(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of the eight characters that are the prompt's digit in turn."""
    wanted = [prompt * 4 for prompt in prompts]
    return [sum(a == b for a, b in zip(text, goal)) / 8 for text, goal in zip(completions, wanted)]


def train(task: Task, shuffle_rows: str, seed: int) -> tuple[list[float], float]:
    """The mean reward of each generation batch, and the seconds of an optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            seed=seed,
            shuffle_rows=shuffle_rows,
            per_device_train_batch_size=ROWS_A_STEP,
            steps_per_generation=STEPS_A_BATCH,
            num_generations=GROUP,
            max_completion_length=task.max_completion_length,
            learning_rate=task.learning_rate,
            max_steps=task.num_steps,
            logging_steps=STEPS_A_BATCH,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=copy.deepcopy(task.model),
            reward_funcs=task.reward,
            args=config,
            train_dataset=Dataset.from_list(random.Random(seed).sample(task.rows, len(task.rows))),
            processing_class=task.tokenizer,
        )
        start = time.perf_counter()
        trainer.train()
        seconds = (time.perf_counter() - start) / task.num_steps
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry], seconds


def table(results: dict[tuple[str, str], list[tuple[list[float], float]]], command: str) -> str:
    """The results as a page."""
    lines = [
        "# Rows of a step: whole groups or mixed",
        "",
        f"Written by `{command}` (one thread, CPU; see its head). {STEPS_A_BATCH} optimizer steps of {ROWS_A_STEP} "
        f"rows a generation batch, groups of {GROUP}.",
        "Rewards are means over seeds ± their standard deviation: of the whole run, and of its last quarter. A "
        "difference is of runs with the same seed, rows minus groups, ± its standard error.",
        "",
        "| task | shuffle_rows | seeds | reward, whole run | reward, last quarter | seconds a step |",
        "|---|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(task for task, _ in results):
        means: list[list[list[float]]] = []
        for setting in SETTINGS:
            runs = results[task, setting]
            whole = [statistics.mean(rewards) for rewards, _ in runs]
            last = [statistics.mean(rewards[-(len(rewards) // 4) :]) for rewards, _ in runs]
            seconds = statistics.mean(seconds for _, seconds in runs)
            lines.append(f"| {task} | {setting} | {len(runs)} | {mean_std(whole)} | {mean_std(last)} | {seconds:.3f} |")
            means.append([whole, last])
        differences = [[b - a for a, b in zip(*columns)] for columns in zip(*means)]
        shown = " | ".join(difference(values) for values in differences)
        lines.append(f"| {task} | difference | | {shown} | |")
    return "\n".join(lines) + "\n"


def mean_std(values: list[float]) -> str:
    """Mean and sample deviation."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


def difference(values: list[float]) -> str:
    """Mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):+.3f} ± {error:.3f}"


def main() -> None:
    """Trains all and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the page; without it the page is printed")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps of a run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    results: dict[tuple[str, str], list[tuple[list[float], float]]] = {}
    for task in (sums(options.steps), digits(options.steps)):
        for seed in range(options.seeds):
            for setting in SETTINGS:
                results.setdefault((task.name, setting), []).append(train(task, setting, seed))
    text = table(results, " ".join(["python", "bench/shuffle_rows.py", *sys.argv[1:]]))
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
