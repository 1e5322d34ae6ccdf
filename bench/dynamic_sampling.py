"""Dynamic sampling on the demo's task: held-out accuracy after as many steps, and what the further rounds cost.

    python bench/dynamic_sampling.py [--seeds 3] [--steps 60] [--rounds 3]

Each seed trains the same warmed-up model twice, without and with `dynamic_sampling_rounds`. Batches are small, 8 groups
of 8, so that groups with equal rewards are felt.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from datasets import Dataset
from demo_accuracy import evaluate
from transformers.utils import logging as transformers_logging

from groupgrad import GRPOTrainer
from groupgrad.apps.demo.run import make_config
from groupgrad.apps.demo.task import (
    correctness_reward,
    make_model,
    make_splits,
    make_tokenizer,
    warm_up,
)

ROWS, GROUP = 64, 8


def main() -> None:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm_up_steps", type=int, default=800)
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    print("| seed | rounds | before | after | groups with a signal | discarded per group | completions | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in range(options.seeds):
        tokenizer, splits = make_tokenizer(), make_splits(seed)
        model = make_model(tokenizer, seed)
        warm_up(model, tokenizer, splits.warm_up, num_steps=options.warm_up_steps, seed=seed)
        before = evaluate(model, tokenizer, splits.held_out, seed=seed).accuracy
        for rounds in (0, options.rounds):
            run = train(copy.deepcopy(model), tokenizer, splits, seed, options.steps, rounds)
            print(
                f"| {seed} | {rounds} | {before:.1%} | "
                + "{after:.1%} | {signal:.0%} | {discarded:.2f} | {completions:,} | {seconds:.0f} |".format(**run),
                flush=True,
            )


def train(model: Any, tokenizer: Any, splits: Any, seed: int, steps: int, rounds: int) -> dict[str, Any]:
    """One run: its accuracy on held-out prompts, the means of its metrics, and its time."""
    with tempfile.TemporaryDirectory() as folder:
        run = argparse.Namespace(output_dir=folder, seed=seed, grpo_steps=steps)
        config = make_config(run, dynamic_sampling_rounds=rounds, disable_tqdm=True)
        sizes = {"per_device_train_batch_size": ROWS, "num_generations": GROUP, "logging_steps": 1}
        settings = config.to_dict() | sizes | {"log_completions": False}
        settings.pop("num_completions_to_print")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=correctness_reward,
            args=type(config)(**settings),
            train_dataset=Dataset.from_list([problem.row() for problem in splits.grpo]),
            processing_class=tokenizer,
        )
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
        logs = [entry for entry in trainer.state.log_history if "reward" in entry]
        discarded = sum(entry.get("dynamic_sampling/discarded", 0.0) for entry in logs) / len(logs)
        return {
            "after": evaluate(trainer.model, tokenizer, splits.held_out, seed=seed).accuracy,
            "signal": 1 - sum(entry["frac_reward_zero_std"] for entry in logs) / len(logs),
            "discarded": discarded,
            "completions": round(ROWS * len(logs) * (1 + discarded)),
            "seconds": seconds,
        }


if __name__ == "__main__":
    main()
