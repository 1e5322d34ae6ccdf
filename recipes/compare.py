"""Trains SmolLM2-135M-Instruct with six recipes on two tasks of reasoning-gym, three seeds each: `make recipes`.

An arm is a task, a recipe and a seed. All arms of a task and a seed start from the same model, see the same prompts in
the same order, and end when they have spent the same number of tokens, those of discarded groups included. A generation
batch serves two optimizer steps, so that ratios leave 1 and the methods differ by more than their reduction. Of a
recipe's file only the method is taken.

A finished arm is a line of `results.jsonl`, and a later call goes on with the arms that are missing. The table goes
into `recipes/README.md`, the picture into `docs/recipes.png`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import yaml
from arms import finished, interval, start_process
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.demo import pretrained
from groupgrad.apps.demo.run import ON_A_CPU
from groupgrad.evaluation.statistics import student_quantile, student_tail
from groupgrad.integrations.reasoning_gym import reasoning_gym_dataset, reasoning_gym_reward

ROOT = Path(__file__).parents[1]
RECIPES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo")
SIZES = ("num_generations", "max_completion_length", "learning_rate", "per_device_train_batch_size")
SHARED = ("gradient_accumulation_steps", "steps_per_generation", "reward_funcs", "output_dir", "cast_lm_head_to_fp32")
"""Keys of a file that are sizes of a run; here they are equal for all."""
TASKS: dict[str, dict[str, Any]] = {
    "products": {"max_terms": 2, "max_digits": 1, "size": 60, "system_prompt": "Output: digits only."},
    "isomorphic_strings": {"system_prompt": "Answer True or False."},
}
"""Tasks of reasoning-gym and their settings."""
ROWS, HELD_OUT = 32, 100
"""Completions of a generation batch, and held-out questions, each of which gets one answer."""
BUDGET, EVALUATIONS = 40_000, 3
"""Tokens of prompts and completions that an arm may spend, and evaluations on the way."""
DAPO_ROUNDS = 2
"""Further rounds of sampling in place of the recipe's 10, which may spend a third of the budget on one batch."""
JOBS = 2
"""Arms that are trained side by side; each has an equal share of the cores."""
START, END = "<!-- comparison: written by `make recipes` -->", "<!-- end of the comparison -->"


class Arm(NamedTuple):
    """One run of the comparison."""

    task: str
    recipe: str
    seed: int


class Budget(TrainerCallback):
    """Evaluates at equal parts of the tokens that a run may spend, and ends it with them; notes accuracies there.

    It acts between generation batches, so a run spends at most one more than `tokens`.
    """

    def __init__(self, tokens: int, evaluations: int) -> None:
        self.tokens, self.part = tokens, tokens / evaluations
        self.seconds, self.started = 0.0, 0.0
        self.curve: dict[str, list[float]] = {"tokens": [], "seconds": [], "accuracy": []}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds += time.perf_counter() - self.started
        if state.global_step % args.steps_per_generation == 0:
            spent = state.num_input_tokens_seen
            control.should_evaluate = spent >= self.part * len(self.curve["tokens"])
            control.should_training_stop = spent >= self.tokens

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        measured = (state.num_input_tokens_seen, self.seconds, metrics["eval_rewards/right/mean"])
        for column, value in zip(self.curve.values(), measured):
            column.append(value)


def right(completions: list[Any], **inputs: Any) -> list[float]:
    """1 for the completions that the task's verifier gives its whole score, else 0: the reward, and the accuracy.

    A part of the score for a right answer in a longer text would be a plateau that short runs stay on.
    """
    return [float(score > 0.999) for score in reasoning_gym_reward(completions, **inputs)]


right.__dict__.update(reasoning_gym_reward.__dict__)


def method(recipe: str) -> dict[str, Any]:
    """The settings of a recipe that are its method."""
    settings = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in settings.items() if key not in (*SIZES, *SHARED)}


def make_config(arm: Arm, tokens: int, folder: Path) -> GRPOConfig:
    """The method of the arm's recipe with the sizes that all share."""
    sizes = {
        "output_dir": str(folder / "-".join(map(str, arm))),
        "seed": arm.seed,
        "max_steps": tokens // ROWS + 2,  # more than can be: the budget ends the run
        "per_device_train_batch_size": ROWS // 2,
        "steps_per_generation": 2,
        "num_generations": 8,
        "max_completion_length": 16,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 1_000_000,  # the budget says when
        "eval_on_start": True,
        "per_device_eval_batch_size": HELD_OUT,
        "num_generations_eval": 1,
        "disable_tqdm": True,
    }
    settings = {**ON_A_CPU, **sizes, **method(arm.recipe)}
    if "dynamic_sampling_rounds" in settings:
        settings["dynamic_sampling_rounds"] = DAPO_ROUNDS
    return GRPOConfig(**settings)


def train(arm: Arm, model: Any, tokenizer: Any, tokens: int, folder: Path, evaluations: int = EVALUATIONS) -> dict:
    """Trains `model` and returns the arm's curve: tokens and seconds of training so far, and held-out accuracy."""
    settings = {"size": 500, "test_size": 3 * HELD_OUT, "seed": 1000 * arm.seed, **TASKS[arm.task]}
    held_out = reasoning_gym_dataset(arm.task, "test", **settings)
    budget = Budget(tokens, evaluations)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right,
        args=make_config(arm, tokens, folder),
        train_dataset=reasoning_gym_dataset(arm.task, **settings),
        eval_dataset=held_out.select(range(min(HELD_OUT, len(held_out)))),
        processing_class=tokenizer,
        callbacks=[budget],
    )
    trainer.train()
    return {"arm": arm, **budget.curve}


_load = lru_cache(pretrained.load)
"""The base model of a process, which is read once."""


def train_base(arm: Arm, tokens: int, folder: Path, evaluations: int = EVALUATIONS) -> dict[str, Any]:
    """In a process of the pool: `train` from the pretrained model, and the seconds that it took with evaluations."""
    transformers_logging.disable_progress_bar()
    model, tokenizer = _load()
    started = time.perf_counter()
    result = train(arm, copy.deepcopy(model), tokenizer, tokens, folder, evaluations)
    return {**result, "wall": time.perf_counter() - started}


def arms(seeds: int) -> list[Arm]:
    """All arms; those of a seed come together, so that an interrupted comparison has whole seeds."""
    return [Arm(task, recipe, seed) for seed, task, recipe in itertools.product(range(seeds), TASKS, RECIPES)]


def estimate(pool: ProcessPoolExecutor, missing: Sequence[Arm], tokens: int, folder: Path) -> float:
    """Minutes that the missing arms take, by one of each task that trains one generation batch, and evaluates twice."""
    samples = {arm.task: arm for arm in reversed(missing)}
    trials = {task: pool.submit(train_base, arm, 1, folder / "trial", 1) for task, arm in samples.items()}
    seconds = 0.0
    for task, trial in ((task, future.result()) for task, future in trials.items()):
        training, evaluation = trial["seconds"][-1], (trial["wall"] - trial["seconds"][-1]) / 2
        arm = training * math.ceil(tokens / trial["tokens"][-1]) + evaluation * (EVALUATIONS + 1)
        seconds += arm * sum(one.task == task for one in missing)
    return seconds / JOBS / 60


def train_missing(missing: Sequence[Arm], options: argparse.Namespace, plan: dict[str, Any]) -> None:
    """Trains arms side by side, and adds a line to `results.jsonl` for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // JOBS, 1)))  # of the processes, which inherit it
    spawn, log = multiprocessing.get_context("spawn"), options.output_dir / "log.txt"
    with ProcessPoolExecutor(JOBS, spawn, start_process, (log,)) as pool:
        print(f"measuring a step of each task; what the runs print goes to {log}", flush=True)
        minutes = estimate(pool, missing, options.tokens, options.output_dir)
        print(f"{len(missing)} arms, {JOBS} side by side: about {minutes:.0f} minutes", flush=True)
        futures = [pool.submit(train_base, arm, options.tokens, options.output_dir) for arm in missing]
        for number, future in enumerate(as_completed(futures), 1):
            result = future.result()
            with (options.output_dir / "results.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({**result, "plan": plan}) + "\n")
            task, recipe, seed = result["arm"]
            accuracy = f"{result['accuracy'][0]:.0%} -> {result['accuracy'][-1]:.0%}"
            print(f"{number:3} of {len(missing)}  {task} {recipe:8} seed {seed}: {accuracy}", flush=True)


def verdict(results: Mapping[Arm, dict[str, Any]], seeds: int) -> str:
    """The sentence that is true of the last accuracies: which recipes differ from GRPO, seed by seed."""
    differing, compared = [], [(task, recipe) for task in TASKS for recipe in RECIPES[1:]]
    for task, recipe in compared:
        pairs = [[results[Arm(task, name, seed)]["accuracy"][-1] for name in (recipe, "grpo")] for seed in range(seeds)]
        mean, half = interval([ours - theirs for ours, theirs in pairs])
        t = math.inf if half == 0 else abs(mean) / half * student_quantile(0.025, seeds - 1)
        if mean and 2 * student_tail(t, seeds - 1) < 0.05 / len(compared):
            differing.append(f"`{recipe}` ends {abs(mean):.1%} {'above' if mean > 0 else 'below'} `grpo` on `{task}`")
    test = f"(paired t-test over the seeds, p < 0.05 after Bonferroni's correction for {len(compared)} comparisons)"
    if not differing:
        return f"No recipe can be told from `grpo` on either task {test}."
    return f"{'; '.join(differing)}. The others cannot be told from `grpo` {test}."


def draw(results: Mapping[Arm, dict[str, Any]], seeds: int, path: Path) -> None:
    """A row a task, accuracy against tokens and seconds: means of the seeds, with the interval of the last one."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4 * len(TASKS)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(TASKS), 2, sharey="row", squeeze=False)
    for (row, task), (column, unit) in itertools.product(enumerate(TASKS), enumerate(("tokens", "seconds"))):
        panel = panels[row][column]
        for recipe in RECIPES:
            runs = [results[Arm(task, recipe, seed)] for seed in range(seeds)]
            points = min(len(run["accuracy"]) for run in runs)
            x, y = (np.mean([run[key][:points] for run in runs], axis=0) for key in (unit, "accuracy"))
            (line,) = panel.plot(x, y, marker="o", markersize=3, label=recipe)
            half = interval([run["accuracy"][points - 1] for run in runs])[1]
            panel.errorbar(x[-1], y[-1], half, color=line.get_color(), capsize=3, alpha=0.6)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.locator_params(axis="x", nbins=6)
        panel.set_xlabel({"tokens": "tokens of prompts and completions", "seconds": "seconds of training"}[unit])
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        panel.grid(alpha=0.3)
    for row, task in enumerate(TASKS):
        panels[row][0].set_ylabel("held-out accuracy")
        panels[row][0].set_title(f"{task}: mean of {seeds} seeds, 95 % interval", loc="left", fontsize=10)
    panels[0][0].legend(frameon=False, ncols=2, fontsize=8)
    figure.savefig(path)


def render(results: Mapping[Arm, dict[str, Any]], options: argparse.Namespace) -> str:
    """The section of `recipes/README.md`."""
    rows = []
    for task, recipe in itertools.product(TASKS, RECIPES):
        runs = [results[Arm(task, recipe, seed)] for seed in range(options.seeds)]
        before = statistics.fmean(run["accuracy"][0] for run in runs)
        mean, half = interval([run["accuracy"][-1] for run in runs])
        tokens, seconds = (statistics.fmean(run[key][-1] for run in runs) for key in ("tokens", "seconds"))
        rows.append(
            f"| {task} | `{recipe}` | {before:.1%} | {mean:.1%} ± {half:.1%} | {tokens:,.0f} | {seconds:,.0f} |"
        )
    tasks = "\n".join(
        f"- `{task}`: " + ", ".join(f"`{key}: {value}`" for key, value in settings.items())
        for task, settings in TASKS.items()
    )
    return (
        f"{START}\n## Compared on a pretrained model\n\n"
        f"SmolLM2-135M-Instruct on two tasks of [reasoning-gym](../docs/reasoning-gym.md), {options.seeds} seeds\n"
        f"each, {options.tokens:,} tokens an arm (`make recipes`):\n\n{tasks}\n\n{verdict(results, options.seeds)}\n\n"
        "An answer that gets the verifier's whole score is right, and has the reward 1; others have 0. Accuracy is\n"
        f"the share of right answers, one to each of {HELD_OUT} held-out questions, at temperature 1; ± is the 95 %\n"
        "interval over seeds. Tokens are those of prompts and completions, those of groups that `dapo` replaces\n"
        f"included (in {DAPO_ROUNDS} rounds at most). Seconds are those of training, {JOBS} arms side by side. Only\n"
        f"the method is the recipe's: generation batches of {ROWS} completions for two steps, learning rate 1e-5,\n"
        "prompts and seeds are the same for all.\n\n"
        "| task | recipe | before | after | tokens | seconds |\n|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
        f"![Held-out accuracy by recipe, against tokens and seconds](../docs/recipes.png)\n{END}"
    )


def main() -> int:
    """Trains the arms that are missing, then draws and writes; 1 if the model or the tasks cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ..., 2 at least (default 3)")
    parser.add_argument("--tokens", type=int, default=BUDGET, help=f"that an arm may spend (default {BUDGET:,})")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/recipes"), help="where results.jsonl is written")
    options = parser.parse_args()
    if (missing_because := pretrained.missing_because()) is not None:
        print(f"the comparison trains SmolLM2-135M-Instruct, but {missing_because}", file=sys.stderr)
        return 1
    options.output_dir.mkdir(parents=True, exist_ok=True)
    plan = {"tokens": options.tokens, "rows": ROWS, "held_out": HELD_OUT, "tasks": TASKS}
    results = finished(options.output_dir / "results.jsonl", plan, Arm)
    if missing := [arm for arm in arms(options.seeds) if arm not in results]:
        train_missing(missing, options, plan)
        results = finished(options.output_dir / "results.jsonl", plan, Arm)
    draw(results, options.seeds, ROOT / "docs" / "recipes.png")
    page = ROOT / "recipes" / "README.md"
    old = page.read_text(encoding="utf-8")
    text = render(results, options)
    page.write_text(old[: old.index(START)] + text + old[old.index(END) + len(END) :], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
