"""A sweep of 8 arms (4 learning rates x 2 losses) on the demo's task: what finding the best arm costs.

`python bench/sweep.py` trains all arms of each seed to their end, and then sweeps them again with successive halving in
a folder of its own. Both sweeps go on where they were interrupted, so several processes may each take some `--seeds`;
one call with all of them then prints the table. `--memory` compares the memory of 8 LoRA arms with that of one,
`--profile` shows what a switch does, `--switching` what switches cost, against the same arms trained without turns.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
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
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of)))
        return 0
    if options.memory:
        return compare_memory()
    if options.profile:
        return profile(options)
    if options.switching:
        return switching(options)
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
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    parser.add_argument("--profile", action="store_true", help="profile the switches of a sweep of 8 arms instead")
    parser.add_argument("--switching", action="store_true", help="measure what switches cost instead")
    parser.add_argument("--repeats", type=int, default=1, help="sweeps that `--switching` measures")
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


def make_demo_sweep(options: argparse.Namespace, folder: Path, seed: int, **content: Any) -> Sweeper:
    """A sweep of the 8 arms from the demo's base model."""
    base = base_model(options)
    arguments = {
        "model": AutoModelForCausalLM.from_pretrained(base),
        "processing_class": AutoTokenizer.from_pretrained(base),
        "reward_funcs": REWARDS,
        "train_dataset": Dataset.from_list([problem.row() for problem in make_splits(0).grpo]),
    }
    content |= {"vary": VARY, "cache_rewards": [function.__name__ for function in REWARDS]}
    return make_sweeper(folder, arguments, settings(options.steps, options.rows, seed=seed), content)


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


def profile(options: argparse.Namespace) -> int:
    """Prints what the turns of a short sweep do beside training."""
    with tempfile.TemporaryDirectory() as folder:
        sweeper = make_demo_sweep(options, Path(folder), 0, turn_steps=5)
        for arm in sweeper.store.arms():
            sweeper._turn(arm)  # makes its trainer
        started, profiler = time.perf_counter(), cProfile.Profile()
        profiler.enable()
        for arm in sweeper.store.arms():
            sweeper._turn(arm)
        profiler.disable()
        seconds = time.perf_counter() - started
        turns = sweeper.store.turns()[len(sweeper.store.arms()) :]
        train_s = sum(turn.train_s for turn in turns)
        switch_s = sum(turn.switch_s for turn in turns)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(90)
    print(f"{len(turns)} turns: {seconds:.2f} s, training {train_s:.2f} s, counted as switching {switch_s:.2f} s")
    return 0


def switching(options: argparse.Namespace) -> int:
    """Prints what turns cost: a sweep with halving against the same steps of the same arms, each arm trained at once.

    The two alternate, `--repeats` times, so that other work of the machine falls on both.
    """
    base_model(options)
    in_turns, at_once, inside, turns = [], [], [], []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            sweeper = make_demo_sweep(options, Path(folder) / "turns", options.seeds[0], halving=True)
            in_turns.append(seconds_of(sweeper.run))
            turns, steps = sweeper.store.turns(), {arm.id: arm.step for arm in sweeper.store.arms()}
            inside.append(cost(sweeper.store))
            alone = make_demo_sweep(options, Path(folder) / "alone", options.seeds[0], halving=True)
            at_once.append(seconds_of(lambda alone=alone, steps=steps: train_at_once(alone, steps)))
    spent = inside[-1]
    print(f"{len(turns)} turns of {spent.steps} steps, {options.repeats} time(s):")
    print("| | in turns | each arm at once | switching costs |\n|---|---|---|---|")
    for name, place in (("wall time", 0), ("processor time", 1)):
        many, one = (sum(found[place] for found in runs) for runs in (in_turns, at_once))
        print(f"| {name} | {many:.1f} s | {one:.1f} s | {many / one - 1:.1%} |")
    train_s, switch_s = sum(one.train_s for one in inside), sum(one.switch_s for one in inside)
    share = switch_s / (train_s + switch_s)
    seconds = f"{switch_s:.2f} s of {train_s + switch_s:.1f} s of wall time, {share:.1%}"
    print(f"counted by the sweeps, with the starts of first turns, which an arm alone has too: {seconds}")
    for name, chosen in (
        ("first", [t for t in turns if not t.first_step]),
        ("later", [t for t in turns if t.first_step]),
    ):
        print(f"{name} turns: {sum(turn.switch_s for turn in chosen) / len(chosen):.3f} s for each of {len(chosen)}")
    return 0


def train_at_once(sweeper: Sweeper, steps: dict[int, int]) -> None:
    """Trains each arm without a turn of another one between, as far as `steps` says, one after the other."""
    for arm in sweeper.store.arms():
        turn = sweeper.turns.run_of(arm).turn(0, lambda _, last=steps[arm.id]: last)[0]
        assert turn.last_step == steps[arm.id], f"{arm.name} was stopped at {turn.last_step}"
        sweeper.turns.drop(arm.id)


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall time and of processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


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
