"""A sweep of 8 arms (4 learning rates x 2 losses) on the demo's task: what finding the best arm costs.

`python bench/sweep.py` trains all arms of each seed to their end, and then sweeps them again with successive halving in
a folder of its own. Both sweeps go on where they were interrupted, so several processes may each take some `--seeds`;
one call with all of them then prints the table of `bench/RESULTS-sweep.md`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from datasets import Dataset
from plumbing import CPU_RUN
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from groupgrad.apps.demo.task import (
    MAX_COMPLETION_LENGTH,
    correctness_reward,
    format_reward,
    make_model,
    make_splits,
    make_tokenizer,
    warm_up,
)
from groupgrad.apps.sweep.factory import ScriptArms
from groupgrad.apps.sweep.report import cost, results
from groupgrad.apps.sweep.sweep_plan import read_plan
from groupgrad.apps.sweep.sweeper import Sweeper

VARY = {"learning_rate": {"range": [1e-5, 1e-2], "num": 4, "scale": "log"}, "loss_type": ["grpo", "dapo"]}
REWARDS = [correctness_reward, format_reward]


def main() -> int:
    """Measures as the command line says, and prints a table."""
    options = parse()
    transformers_logging.disable_progress_bar()
    rows = [measure(options, seed) for seed in options.seeds]
    print("\n| seed | arm found | arm that is the best | behind the best | steps made | switching |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print("| {seed} | {found} | {best} | {behind} | {share:.1%} | {switching:.1%} |".format(**row))
    same = sum(row["found"] == row["best"] for row in rows)
    tied = sum(row["p_value"] > 0.05 for row in rows)
    print(f"\nbest arm found in {same} of {len(rows)} seeds, it or one that is not clearly worse (p > 0.05) in {tied}")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of an arm; the demo has 200")
    parser.add_argument("--rows", type=int, default=64, help="completions of a step, 8 for each prompt")
    parser.add_argument("--warm_up_steps", type=int, default=800)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-sweep"))
    return parser.parse_args()


def base_model(options: argparse.Namespace) -> Path:
    """The demo's base model of seed 0, made once."""
    folder = options.folder / "base"
    if not (folder / "config.json").is_file():
        tokenizer = make_tokenizer()
        model = make_model(tokenizer, 0)
        warm_up(model, tokenizer, make_splits(0).warm_up, num_steps=options.warm_up_steps, seed=0)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def make_demo_sweep(options: argparse.Namespace, folder: Path, seed: int, **content: Any) -> Sweeper:
    """A sweep of the 8 arms from the demo's base model."""
    base = base_model(options)
    arguments = {
        "model": AutoModelForCausalLM.from_pretrained(base),
        "processing_class": AutoTokenizer.from_pretrained(base),
        "reward_funcs": REWARDS,
        "train_dataset": Dataset.from_list([problem.row() for problem in make_splits(0).grpo]),
    }
    content |= {"vary": VARY}
    args = settings(options.steps, options.rows, seed)
    plan = read_plan(content, args)
    sweeper = Sweeper(plan, folder, ScriptArms(arguments, {}))
    sweeper.prepare({**content, "base": {name: str(value) for name, value in args.items()}})
    return sweeper


def measure(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One seed: the arm that halving finds, and the one that is best when all are trained to their end."""
    whole = make_demo_sweep(options, options.folder / f"all-{seed}", seed, turn_steps=options.steps)
    whole.run()
    halved = make_demo_sweep(options, options.folder / f"halved-{seed}", seed, halving=True)
    halved.run()
    rows = {row.name: row for row in results(whole.store)}
    best, found, spent = next(iter(rows.values())), results(halved.store)[0], cost(halved.store)
    assert found.reward == rows[found.name].reward, "an arm has other rewards in a sweep with halving"
    behind = rows[found.name].behind
    print(f"\nseed {seed}: " + ", ".join(f"{name} {row.reward:.3f}" for name, row in rows.items()), flush=True)
    return {
        "seed": seed,
        "found": f"{found.name} ({found.reward:.3f})",
        "best": f"{best.name} ({best.reward:.3f})",
        "behind": "the same" if behind is None else behind.text,
        "p_value": 1.0 if behind is None else behind.p_value,
        "share": spent.steps / spent.all_steps,
        "switching": spent.switch_share,
    }


def settings(steps: int, rows: int, seed: int) -> dict[str, Any]:
    """Fields of the configuration, those of the demo on a smaller batch."""
    return {
        **CPU_RUN,
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "num_generations": 8,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "adam_beta2": 0.98,
        "beta": 0.0,
        "logging_steps": 5,
        "seed": seed,
    }


if __name__ == "__main__":
    sys.exit(main())
