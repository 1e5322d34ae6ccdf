"""Trains one of the programs with three seeds and draws its reward: `python curves.py PROGRAM MODEL PICTURE ...`.

Prints the mean reward of the first and of the last ten steps, and by a one-sided t-test over the seeds how likely such
a rise is by chance.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from groupgrad.evaluation.statistics import student_tail

SEEDS, ENDS = 3, 10


def rewards(program: Path, model: str, seed: int, settings: list[str]) -> list[float]:
    """The reward of each step of a run, a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(program), model, folder, f"seed={seed}", "logging_steps=1", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [line["reward"] for line in map(json.loads, lines) if "reward" in line]


def main() -> None:
    name, model, picture, *settings = sys.argv[1:]
    figure = Figure(figsize=(7, 3.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    gains = []
    for seed in range(SEEDS):
        curve = rewards(Path(name), model, seed, settings)
        first, last = statistics.fmean(curve[:ENDS]), statistics.fmean(curve[-ENDS:])
        gains.append(last - first)
        print(f"seed {seed}: {first:.1%} in the first {ENDS} steps, {last:.1%} in the last {ENDS} of {len(curve)}")
        mean = [statistics.fmean(curve[max(0, step - 4) : step + 1]) for step in range(len(curve))]
        (line,) = axes.plot(range(1, len(curve) + 1), mean, label=f"seed {seed}")
        axes.plot(range(1, len(curve) + 1), curve, color=line.get_color(), alpha=0.25, linewidth=0.8)
    t = statistics.fmean(gains) / (statistics.stdev(gains) / SEEDS**0.5)
    print(f"p = {student_tail(t, SEEDS - 1):.2g}")
    axes.set(xlabel="optimizer step", ylabel="reward, mean of 5 steps", title=Path(name).name, ylim=(0, None))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(picture)


if __name__ == "__main__":
    main()
