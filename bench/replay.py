"""Prints the table of docs/replay.md, bits that differ in replays of random rows, and how many faults are found.

    python bench/replay.py [--replays 100] [--faults 10]

The runs are those of the tests of `replay`: 12 steps of 8 rows of a small model, on a CPU in one thread, with a
checkpoint every 4 steps. A fault flips one bit of one weight or changes one reward, in turn, at a random step.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS / "helpers"))
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

from repeatable_runs import KINDS, make_trainer  # noqa: E402
from replay_rounds import STEPS, numbers_of, random_faults, random_replays  # noqa: E402

from groupgrad.apps.replay.wording import replay_report  # noqa: E402


def main() -> int:
    """Prints both. Returns 1 if a bit differs or a fault is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--faults", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return max(replays(Path(folder), options.replays), faults(Path(folder), options.faults))


def replays(root: Path, count: int) -> int:
    """Prints a row for each kind of run, and their sum; on stderr, the report of a replay that differs."""

    def run_of(kind: str) -> Path:
        if not (root / kind).exists():
            make_trainer(root / kind, **KINDS[kind]).train()
        return root / kind

    totals: dict[str, Counter[str]] = {kind: Counter() for kind in [*KINDS, "all"]}
    with redirect_stdout(sys.stderr):  # the lines of training
        for kind, result in random_replays(run_of, root / "unused", count):
            found = Counter(rows=1, steps=result.step - result.start.step, numbers=numbers_of(result))
            if not result.is_same:
                found["different"] = 1
                print(replay_report(result))
            for name in (kind, "all"):
                totals[name].update(found)
    print("| run | (step, row) replayed | steps repeated | numbers compared | replays with a bit that differs |")
    print("|---|---|---|---|---|")
    for kind, total in totals.items():
        name = kind.replace("_", " ")
        print(f"| {name} | {total['rows']} | {total['steps']} | {total['numbers']:,} | {total['different']} |")
    return int(totals["all"]["different"] > 0)


def faults(root: Path, count: int) -> int:
    """Prints how many faults are found at their step."""
    with redirect_stdout(sys.stderr):
        make_trainer(root / "clean", max_steps=STEPS).train()
        found = sum(step == result.first_step for _, step, result in random_faults(root / "clean", root, count))
    print(f"\nfaults found at their step: {found} of {count}")
    return int(found < count)


if __name__ == "__main__":
    sys.exit(main())
