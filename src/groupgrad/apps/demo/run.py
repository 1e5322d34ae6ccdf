"""Makes a small model and trains it with GRPO to write out its steps, offline, in minutes on two cores.

1. Make a small base model: a Qwen3-architecture model and its tokenizer, trained on careless demonstrations of a sum
   written in steps (`groupgrad.apps.demo.task`). It has seen how it is done, but mostly guesses.
2. Measure it on held-out prompts.
3. Train it with GRPO: one reward for a right answer, one for the format.
4. Measure it again, on the same prompts in the same way, after loading it back from disk.

The accuracies that it promises are `MAX_BEFORE` and `MIN_AFTER`.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.utils import logging as transformers_logging

from groupgrad.apps.demo.curves import plot_rewards
from groupgrad.apps.demo.task import (
    MAX_COMPLETION_LENGTH,
    Problem,
    Score,
    correctness_reward,
    evaluate,
    format_reward,
    make_model,
    make_splits,
    make_tokenizer,
    warm_up,
)
from groupgrad.config import GRPOConfig
from groupgrad.run_folder.timings import Timings
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
"""What the tiny model and the pretrained one train with alike."""

MAX_BEFORE, MIN_AFTER = 0.40, 0.85
"""Sampled held-out accuracy that the base model may have at most, and the trained model must have at least."""

BASE = "base"
"""Folder in that of the run with the model that GRPO starts from, for a replay."""

DRAWS = importlib.util.find_spec("matplotlib") is not None
"""True if a picture of the rewards is drawn."""


class _KeepBase(TrainerCallback):
    """Saves the model that GRPO starts from, once the run has its folder to itself."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Writes `BASE`."""
        model.save_pretrained(Path(args.output_dir) / BASE)


@dataclass(slots=True, frozen=True)
class Measured:
    """A model on the held-out prompts, at temperature 1 (what is trained and judged) and greedily (for comparison)."""

    sampled: Score
    greedy: Score


def run(options: argparse.Namespace, command: dict[str, Any] | None = None) -> int:
    """Runs the demo and reports; 0 if the promised accuracies were met, else 1.

    `options` are `seed`, `output_dir`, `warm_up_steps` and `grpo_steps`. The run records `command`, its command line.
    """
    timings = Timings()
    transformers_logging.disable_progress_bar()
    splits = make_splits(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.seed)

    print(f"1. Base model: {model.num_parameters():,} parameters, trained on careless demonstrations")
    with timings.phase("warm-up"):
        warm_up(model, tokenizer, splits.warm_up, num_steps=options.warm_up_steps, seed=options.seed)
    with timings.phase("evaluation"):
        before = measure(model, tokenizer, splits.held_out, options.seed)
    print(f"   held-out accuracy {before.sampled.accuracy:.1%}, format {before.sampled.format_rate:.1%}\n")

    print(f"2. GRPO: {options.grpo_steps} steps")
    trainer = make_trainer(options, model)
    trainer.recorder.command = command
    trainer.add_callback(_KeepBase)
    with timings.phase("GRPO"):
        trainer.train()
    print(f"\n{seconds_of_a_step(trainer.state.log_history)}\n{mismatch(trainer.state.log_history)}")
    trainer.save_model(options.output_dir)
    output_dir = Path(options.output_dir)
    if DRAWS:
        plot_rewards(trainer.state.log_history, output_dir / "rewards.png")

    model = AutoModelForCausalLM.from_pretrained(options.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(options.output_dir)
    with timings.phase("evaluation"):
        after = measure(model, tokenizer, splits.held_out, options.seed)
    return report(before, after, splits.held_out, timings, output_dir)


def make_trainer(options: argparse.Namespace, model: str | PreTrainedModel) -> GRPOTrainer:
    """The trainer of a model that was warmed up, or of the folder that it was saved in."""
    return GRPOTrainer(
        model=model,
        reward_funcs=[correctness_reward, format_reward],
        args=make_config(options),
        train_dataset=Dataset.from_list([problem.row() for problem in make_splits(options.seed).grpo]),
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


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], seed: int) -> Measured:
    """Samples one answer a problem at temperature 1, with the same random numbers each time, and one greedily."""
    return Measured(
        sampled=evaluate(model, tokenizer, problems, seed=seed),
        greedy=evaluate(model, tokenizer, problems, greedy=True),
    )


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


def report(before: Measured, after: Measured, problems: list[Problem], timings: Timings, output_dir: Path) -> int:
    """Prints before and after; 0 if the promised accuracies were met, else 1."""
    print(f"\n{len(problems)} held-out prompts, in neither training set; one completion each, sampled at temperature 1")
    print(f"{'':22}{'before':>8}{'after':>8}")
    for name, first, second in (
        ("accuracy", before.sampled.accuracy, after.sampled.accuracy),
        ("format", before.sampled.format_rate, after.sampled.format_rate),
        ("accuracy if greedy", before.greedy.accuracy, after.greedy.accuracy),
    ):
        print(f"  {name:20}{first:8.1%}{second:8.1%}")
    print("\nThe first of them:")
    for problem, first, second in list(zip(problems, before.sampled.completions, after.sampled.completions))[:4]:
        print(f"  {problem.prompt}\n    before  {first}\n    after   {second}")
    print_end(timings, output_dir, f"the model and tokenizer (from_pretrained), {BASE}/")
    if before.sampled.accuracy > MAX_BEFORE or after.sampled.accuracy < MIN_AFTER:
        print(f"Missed: accuracy should go from at most {MAX_BEFORE:.0%} to at least {MIN_AFTER:.0%}.")
        return 1
    print(f"Met: accuracy went from at most {MAX_BEFORE:.0%} to at least {MIN_AFTER:.0%}.")
    return 0


def print_end(timings: Timings, output_dir: Path, files: str) -> None:
    """Prints the seconds of each phase, what is in the folder beside `files`, and how to look at it."""
    seconds = timings.take()
    times = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items())
    print(f"\nTime: {times}; {sum(seconds.values()):.0f} s in all")
    picture = ", rewards.png" if DRAWS else ""
    print(f"Files in {output_dir}/: {files}{picture}, metrics.jsonl, rollouts/, completions/")
    if not DRAWS:
        print("(`pip install 'groupgrad[plot]'` adds the picture of the rewards)")
    print(f"Look at them: groupgrad view {output_dir}")
