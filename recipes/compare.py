"""Trains the demo's task with six recipes, three seeds each: `make recipes`. Draws one picture and writes one table.

All arms of a seed start from the same warmed-up model and the same prompts. A generation batch serves two optimizer
steps, so that ratios leave 1 and the methods differ by more than their reduction. Of a recipe's file only the method
is taken; sizes are the demo's. The table goes into `recipes/README.md`, the picture into `docs/recipes.png`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).parents[1]

import yaml  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from groupgrad import GRPOTrainer  # noqa: E402
from groupgrad.apps.demo.curves import running_average, series  # noqa: E402
from groupgrad.apps.demo.run import make_config  # noqa: E402
from groupgrad.apps.demo.task import (  # noqa: E402
    correctness_reward,
    evaluate,
    format_reward,
    make_model,
    make_splits,
    make_tokenizer,
    warm_up,
)

RECIPES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo")
SIZES = ("num_generations", "max_completion_length", "learning_rate", "per_device_train_batch_size")
SHARED = ("gradient_accumulation_steps", "steps_per_generation", "reward_funcs", "output_dir", "cast_lm_head_to_fp32")
"""Keys of a file that are sizes of a run; here they are equal for all."""
START, END = "<!-- comparison: written by `make recipes` -->", "<!-- end of the comparison -->"


def main() -> None:
    """Trains every recipe with every seed, then draws and writes."""
    options = parse()
    transformers_logging.disable_progress_bar()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in RECIPES}
    for seed in range(options.seeds):
        tokenizer, splits = make_tokenizer(), make_splits(seed)
        model = make_model(tokenizer, seed)
        warm_up(model, tokenizer, splits.warm_up, num_steps=options.warm_up_steps, seed=seed)
        before = evaluate(model, tokenizer, splits.held_out, seed=seed).accuracy
        for name in RECIPES:
            run = train(name, copy.deepcopy(model), tokenizer, splits, seed, options)
            results[name].append({"seed": seed, "before": before, **run})
            print(f"{name:10} seed {seed}: {before:.1%} -> {run['after']:.1%}", flush=True)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "results.json").write_text(json.dumps(results), encoding="utf-8")
    draw(results, ROOT / "docs" / "recipes.png")
    write(results, options, ROOT / "recipes" / "README.md")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default 3)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, 128 completions each (default 60)")
    parser.add_argument(
        "--warm_up_steps", type=int, default=800, help="supervised steps of the base model (default 800)"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/recipes"), help="where results.json is written")
    return parser.parse_args()


def method(name: str) -> dict[str, Any]:
    """The settings of a recipe that are its method."""
    settings = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in settings.items() if key not in (*SIZES, *SHARED)}


def train(name: str, model: Any, tokenizer: Any, splits: Any, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy on held-out prompts after training, and the curve of the reward."""
    run = SimpleNamespace(output_dir=str(options.output_dir / f"{name}-{seed}"), seed=seed, grpo_steps=options.steps)
    config = make_config(run, steps_per_generation=2)  # pyright: ignore[reportArgumentType]
    settings = config.to_dict() | {"per_device_train_batch_size": 128, "log_completions": False} | method(name)
    settings.pop("num_completions_to_print")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[correctness_reward, format_reward],
        args=type(config)(**settings),
        train_dataset=Dataset.from_list([problem.row() for problem in splits.grpo]),
        processing_class=tokenizer,
    )
    trainer.train()
    # The mean of all completions, also where groups with equal rewards are discarded.
    metric = "dynamic_sampling/reward" if settings.get("dynamic_sampling_rounds") else "reward"
    rewards = series(trainer.state.log_history, metric)
    after = evaluate(trainer.model, tokenizer, splits.held_out, seed=seed).accuracy
    return {"after": after, "steps": rewards.index.tolist(), "rewards": rewards.tolist()}


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One line a recipe: the mean of the seeds, and their range."""
    import numpy as np
    import pandas as pd
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, runs in results.items():
        steps = runs[0]["steps"]
        curves = np.array([running_average(pd.Series(run["rewards"]), span=3).to_numpy() for run in runs])
        (line,) = axis.plot(steps, curves.mean(0), label=name)
        axis.fill_between(steps, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.12, linewidth=0)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("mean reward")
    axis.set_title(f"The demo's task by recipe: mean and range of {len(runs)} seeds", loc="left", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, ncols=2)
    figure.savefig(path)


def write(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace, page: Path) -> None:
    """Puts the table of results between the marks of the page."""
    rows = []
    for name, runs in results.items():
        after = [run["after"] for run in runs]
        cells = " | ".join(f"{value:.1%}" for value in after)
        rows.append(f"| `{name}` | {cells} | {statistics.mean(after):.1%} |")
    before = ", ".join(f"{run['before']:.1%}" for run in results[RECIPES[0]])
    seeds = " | ".join(f"seed {run['seed']}" for run in results[RECIPES[0]])
    text = (
        f"{START}\n## Compared on the demo's task\n\n"
        f'`make recipes RECIPES_ARGS="--steps {options.steps} --seeds {options.seeds} '
        f'--warm_up_steps {options.warm_up_steps}"`: held-out accuracy after\n{options.steps} optimizer steps of 128 '
        "completions, two steps a generation batch; one completion for each of 512\n"
        f"prompts, at temperature 1. Before training: {before}.\nOnly the method is the recipe's; sizes and the "
        "learning rate are the demo's, so this shows that each method trains,\nand is no ranking. `dapo` samples more: "
        "it replaces groups with equal rewards, and its picture counts these too.\n\n"
        f"| recipe | {seeds} | mean |\n|---|{'---|' * (options.seeds + 1)}\n" + "\n".join(rows) + "\n\n"
        f"![Mean reward of the demo's task by recipe](../docs/recipes.png)\n{END}"
    )
    old = page.read_text(encoding="utf-8")
    page.write_text(old[: old.index(START)] + text + old[old.index(END) + len(END) :], encoding="utf-8")


if __name__ == "__main__":
    main()
