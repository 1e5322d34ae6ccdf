"""A sweep of 8 arms (4 learning rates x 2 losses) on the demo's task: what finding the best arm costs.

`python bench/sweep.py` first sweeps with successive halving, then trains the dropped arms to their end as well, which
shows which arm is really the best. `--memory` compares the memory of 8 LoRA arms with that of one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import psutil
import torch
from datasets import Dataset
from tiny_task import (
    MAX_COMPLETION_LENGTH,
    correctness_reward,
    format_reward,
    make_model,
    make_splits,
    make_tokenizer,
    warm_up,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from groupgrad.sweep.compare import difference
from groupgrad.sweep.factory import ScriptArms
from groupgrad.sweep.plan import SweepPlan, read_plan
from groupgrad.sweep.report import cost
from groupgrad.sweep.runner import Sweeper
from groupgrad.sweep.store import DROPPED, WAITING

VARY = {"learning_rate": [5e-5, 2e-4, 6e-4, 2e-3], "loss_type": ["grpo", "dapo"]}
LAST_SHARE = 0.25
"""Share of the last steps of a whole run that tell which arm is the best."""


def main() -> int:
    """Measures as the command line says, and prints a table."""
    options = parse()
    transformers_logging.disable_progress_bar()
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of)))
        return 0
    if options.memory:
        return compare_memory()
    rows = [measure(options, seed) for seed in range(options.seeds)]
    found = sum(row["found"] for row in rows)
    tied = sum(row["tied"] for row in rows)
    shares = ", ".join(f"{row['share']:.1%}" for row in rows)
    print(f"\nbest arm found in {found} of {len(rows)} seeds, not clearly worse than it (p > 0.05) in {tied}")
    print(f"share of the steps of training all arms to their end: {shares}")
    print("switching: " + ", ".join(f"{row['switching']:.1%}" for row in rows))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of an arm")
    parser.add_argument("--rows", type=int, default=64, help="completions of a step, 8 for each prompt")
    parser.add_argument("--warm_up_steps", type=int, default=800)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-sweep"))
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    parser.add_argument("--memory_of", type=int, help=argparse.SUPPRESS)
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


def make_sweeper(folder: Path, arguments: dict[str, Any], args: dict[str, Any], content: dict[str, Any]) -> Sweeper:
    """A sweep whose arms are written into its folder."""
    plan = read_plan(content, args)
    sweeper = Sweeper(plan, folder, ScriptArms(arguments, {}, plan.cache_rewards))
    sweeper.prepare({**content, "base": {name: str(value) for name, value in args.items()}})
    return sweeper


def measure(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One seed: the arm that halving finds, and the arm that is best when all are trained to their end."""
    base = base_model(options)
    rows = [problem.row() for problem in make_splits(0).grpo]
    arguments = {
        "model": AutoModelForCausalLM.from_pretrained(base),
        "processing_class": AutoTokenizer.from_pretrained(base),
        "reward_funcs": [correctness_reward, format_reward],
        "train_dataset": Dataset.from_list(rows),
    }
    args = settings(options.steps, options.rows, seed=seed)
    content = {"vary": VARY, "halving": True, "cache_rewards": ["correctness_reward", "format_reward"]}
    sweeper = make_sweeper(options.folder / f"seed-{seed}", arguments, args, content)
    sweeper.run()
    store = sweeper.store
    if store.fact("halved") is None:
        chosen = next(arm for arm in store.arms() if arm.state == "done")
        spent = cost(store)
        store.set_fact("halved", {"name": chosen.name, "steps": spent.steps, "switching": spent.switch_share})
    halved = store.fact("halved")
    to_the_end(sweeper.plan, sweeper)
    arms = {arm.name: arm for arm in store.arms()}
    after = round(options.steps * (1 - LAST_SHARE))
    last = {name: store.rewards(arm.id, after, options.steps) for name, arm in arms.items()}
    means = {name: mean_of(found) for name, found in last.items()}
    best = max(means, key=lambda name: means[name])
    behind = difference(last[best], last[halved["name"]], "reward")
    row = {
        "found": best == halved["name"],
        "tied": best == halved["name"] or behind.p_value > 0.05,
        "share": halved["steps"] / (len(arms) * options.steps),
        "switching": halved["switching"],
    }
    print(f"\nseed {seed}: chosen {halved['name']} ({means[halved['name']]:.3f}), best {best} ({means[best]:.3f})")
    print("  " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()), flush=True)
    print(f"  behind the best {behind.mean:.3f} ± {behind.error:.3f} (p = {behind.p_value:.2g}), {row}", flush=True)
    return row


def to_the_end(plan: SweepPlan, sweeper: Sweeper) -> None:
    """Trains the arms that were dropped, too."""
    for arm in sweeper.store.arms():
        if arm.state == DROPPED:
            sweeper.store.set_state(arm.id, WAITING)
    sweeper.plan = dataclasses.replace(plan, halving=None)
    sweeper.run()


def mean_of(steps: Any) -> float:
    """The mean reward of some steps."""
    values = [value for rewards in steps.values() for value in rewards.means["reward"]]
    return sum(values) / len(values)


def settings(steps: int, rows: int, **more: Any) -> dict[str, Any]:
    """Fields of the configuration, those of the demo on a smaller batch."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "num_generations": 8,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "adam_beta2": 0.98,
        "beta": 0.0,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        **more,
    }


def compare_memory() -> int:
    """Memory of 8 LoRA arms and of one, each measured in a process of its own."""
    found = {}
    for count in (1, 8):
        command = [sys.executable, __file__, "--memory_of", str(count)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[count] = json.loads(output.strip().splitlines()[-1])
        print(f"{count} arm(s): {found[count]}", flush=True)
    for name in found[1]:
        print(f"{name}: 8 arms take {found[8][name] / found[1][name]:.2f} times the memory of one")
    return 0


def memory_of(count: int) -> dict[str, float]:
    """MiB of this process after `count` LoRA arms of one base model (a random one) have had turns, and at most."""
    from peft import LoraConfig

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer.get_vocab()),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(f"{folder}/base")
        tokenizer.save_pretrained(f"{folder}/base")
        arguments = {
            "model": f"{folder}/base",
            "reward_funcs": [format_reward],
            "train_dataset": Dataset.from_list([problem.row() for problem in make_splits(0).grpo]),
            "peft_config": LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        }
        args = settings(2, 8, max_completion_length=8, num_generations=4)
        rates = [1e-5 * (index + 1) for index in range(count)]
        content = {"arms": [{"learning_rate": rate} for rate in rates], "turn_steps": 1}
        sweeper = make_sweeper(Path(folder) / "sweep", arguments, args, content)
        for _ in range(count):  # the first turn of each arm, after which all trainers are kept
            arm = sweeper._next()
            assert arm is not None
            sweeper._turn(arm)
        present = psutil.Process().memory_info().rss / 2**20
    at_most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"present MiB": round(present), "at most MiB": round(at_most)}


if __name__ == "__main__":
    sys.exit(main())
