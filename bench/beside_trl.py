"""Trains SmolLM2-135M-Instruct with groupgrad and with TRL on sums of two numbers, and draws both learning curves.

    python bench/beside_trl.py [--seeds 3] [--steps 30] [--trl_python PYTHON]

The trainers have the same model, questions, reward and hyper-parameters, and take their steps in turn, so that a change
in the machine's speed meets both. `bench/.logs/beside-trl.jsonl` has a line for each seed that is done; a later call
goes on with the others. Draws `docs/beside-trl.png`, and prints how much sooner the same accuracy is reached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plumbing import BENCH, LOGS, MODELS, describe_machine, make_trl_environment, set_environment, table

if __name__ == "__main__":  # before torch comes
    set_environment()

from materials import prepare
from run import start_worker
from workloads import LEARNING

TRAINERS = {"groupgrad": "#2563a8", "trl": "#b4552d"}
RESULTS, PICTURE = LOGS / "beside-trl.jsonl", BENCH.parent / "docs" / "beside-trl.png"
SPAN = 5
"""Steps that a running average is over: a step's accuracy is that of 32 answers."""
LEVELS = (0.2, 0.3, 0.4, 0.5, 0.6)
"""Accuracies that are looked for in the curves."""


def train(seed: int, steps: int, pythons: dict[str, Path]) -> dict[str, Any]:
    """Seconds and mean rewards of each step of both trainers."""
    folder = prepare(LEARNING, MODELS)
    workers = {name: start_worker(name, python, LEARNING, folder, seed=seed) for name, python in pythons.items()}
    done: dict[str, Any] = {name: {"seconds": [], "rewards": []} for name in workers}
    try:
        versions = {name: worker.read("ready")["versions"] for name, worker in workers.items()}
        for number in range(steps):
            for name in list(workers)[:: 1 if number % 2 else -1]:
                step = workers[name].ask("step")
                done[name]["seconds"].append(step["seconds"])
                done[name]["rewards"].append(statistics.fmean(step["rewards"]))
                shown = f"{name:9} {step['seconds']:5.1f} s, {done[name]['rewards'][-1]:.0%} right"
                print(f"  seed {seed}, step {number + 1:2} of {steps}: {shown}", flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    return {"seed": seed, "steps": steps, "work": repr(LEARNING), "versions": versions, **done}


def finished(path: Path, steps: int) -> dict[int, dict[str, Any]]:
    """The seeds that are done with this many steps of this work."""
    lines = path.read_text().splitlines() if path.exists() else []
    runs = [json.loads(line) for line in lines]
    return {one["seed"]: one for one in runs if (one["steps"], one["work"]) == (steps, repr(LEARNING))}


def curve(runs: Sequence[dict[str, Any]], trainer: str) -> tuple[Any, Any]:
    """Means over seeds: the seconds that have passed after each step, and the running average of the rewards."""
    import numpy as np
    import pandas as pd

    passed = np.mean([np.cumsum(one[trainer]["seconds"]) for one in runs], axis=0)
    rewards: Any = pd.Series(np.mean([one[trainer]["rewards"] for one in runs], axis=0))
    return passed, rewards.rolling(SPAN, min_periods=1).mean().to_numpy()


def reached(runs: Sequence[dict[str, Any]], level: float) -> dict[str, tuple[int, float]] | None:
    """The step, and the seconds, after which each trainer's mean curve is first at `level`; None if one never is."""
    found = {}
    for name in TRAINERS:
        passed, rewards = curve(runs, name)
        if not (rewards >= level).any():
            return None
        step = int((rewards >= level).argmax())
        found[name] = (step + 1, float(passed[step]))
    return found


def render(runs: Sequence[dict[str, Any]]) -> str:
    """A table of the accuracies that both have reached."""
    rows = []
    for level in LEVELS:
        if (at := reached(runs, level)) is not None:
            (our_step, ours), (their_step, theirs) = at["groupgrad"], at["trl"]
            seconds = [f"{our_step}", f"{their_step}", f"{ours:.0f} s", f"{theirs:.0f} s", f"{theirs / ours:.1f}×"]
            rows.append([f"{level:.0%}", *seconds])
    header = ["right answers", "step of groupgrad", "step of TRL", "groupgrad after", "TRL after", "sooner"]
    return table(header, rows)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy by step, and by seconds: the mean of the seeds, and pale the single ones."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for name, color in TRAINERS.items():
        for number, group in enumerate([*([one] for one in runs), runs]):
            passed, rewards = curve(group, name)
            is_mean = number == len(runs)
            look: dict[str, Any] = {"color": color, "linewidth": 2 if is_mean else 0.8, "alpha": 1 if is_mean else 0.3}
            label = {"groupgrad": "groupgrad", "trl": "TRL"}[name] if is_mean else None
            panels[0].plot(range(1, len(rewards) + 1), rewards, label=label, **look)
            panels[1].plot(passed, rewards, label=label, **look)
    panels[0].set_title("by optimizer step", loc="left", fontsize=10)
    panels[0].set_xlabel("optimizer step")
    panels[0].set_ylabel(f"right answers (mean of {SPAN} steps)")
    panels[1].set_title("by the clock", loc="left", fontsize=10)
    panels[1].set_xlabel("seconds of training")
    for panel in panels:
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    """Train the seeds that are missing, then draw and print; 1 if the model cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default 3)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of 32 answers (default 30)")
    parser.add_argument("--trl_python", type=Path, help="an interpreter that has TRL, instead of a new environment")
    options = parser.parse_args()
    runs = finished(RESULTS, options.steps)
    missing = [seed for seed in range(options.seeds) if seed not in runs]
    if missing:
        print(f"{LEARNING.describe()}; {describe_machine()}", flush=True)
        trl_python = options.trl_python or make_trl_environment(BENCH / ".venv-trl")
    for seed in missing:
        try:
            runs[seed] = train(seed, options.steps, {"groupgrad": Path(sys.executable), "trl": trl_python})
        except FileNotFoundError as error:
            print(error)
            return 1
        with RESULTS.open("a") as file:
            file.write(json.dumps(runs[seed]) + "\n")
    shown = [runs[seed] for seed in range(options.seeds)]
    draw(shown, PICTURE)
    print(f"\n{options.seeds} seeds, {LEARNING.describe()}\n\n{render(shown)}\n\ndrawn: {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
