"""Halving, replayed on the recorded rewards of the arms of `bench/sweep.py`.

`python bench/sweep_replay.py --seeds 5 6` trains the arms of each seed to their end, once, and goes on where it was
interrupted. An arm has the same rewards in any sweep, so what a sweep with halving would have done can be read from
them. Arms of the lowest and the highest learning rate stop after a quarter of the steps to save time: they would have
to win from less than half of the best reward. One that halving takes further is an error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

import sweep as bench
from groupgrad.apps.sweep import compare
from groupgrad.apps.sweep.report import LAST_SHARE
from groupgrad.apps.sweep.store import STOPPED, WAITING, Arm, Store
from groupgrad.apps.sweep.sweep_plan import Halving

HOPELESS = (min, max)
"""The learning rates whose arms stop early."""


def main() -> int:
    """Trains what is missing, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rungs", type=int, nargs="+", help="steps of the rungs in place of those of a sweep")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-sweep"))
    options = parser.parse_args(namespace=argparse.Namespace(steps=120, rows=64, warm_up_steps=800))
    transformers_logging.disable_progress_bar()
    stores = {seed: trained(options, seed) for seed in options.seeds}
    print("| seed | arm found | arm that is the best | behind the best | steps made |\n|---|---|---|---|---|")
    rows = [replayed(store, Halving(), options.rungs) for store in stores.values()]
    for seed, row in zip(stores, rows):
        print(f"| {seed} | {row['found']} | {row['best']} | {row['behind']} | {row['share']:.1%} |")
    same, tied = sum(row["lead"] == 0.0 for row in rows), sum(row["p_value"] > 0.05 for row in rows)
    print(f"\nbest arm found in {same} of {len(rows)} seeds, it or one that is not clearly worse in {tied} (p > 0.05)")
    return 0


def trained(options: argparse.Namespace, seed: int) -> Store:
    """A sweep whose arms have come to their end, but the hopeless ones."""
    folder, quarter = options.folder / f"all-{seed}", options.steps // 4
    if not (folder / "sweep.sqlite").is_file() or any(arm.state == WAITING for arm in Store(folder).arms()):
        sweeper = bench.make_demo_sweep(options, folder, seed, turn_steps=quarter)
        for arm in sweeper.store.arms():
            if not arm.step:
                sweeper._turn(arm)
        rates = [arm.changes["learning_rate"] for arm in sweeper.store.arms()]
        for arm in sweeper.store.arms():
            if arm.state == WAITING and arm.changes["learning_rate"] in [end(rates) for end in HOPELESS]:
                sweeper.store.set_state(arm.id, STOPPED)
        sweeper.run()
    return Store(folder)


def replayed(store: Store, halving: Halving, rungs: list[int] | None = None) -> dict[str, Any]:
    """The arm that a sweep with halving would have found, beside the best one, and its share of all steps.

    `rungs` are the steps of its rungs, by default those of `halving`.
    """
    arms = {arm.id: arm for arm in store.arms()}
    length = max(arm.max_steps or 0 for arm in arms.values())
    rungs = halving.rungs(length) if rungs is None else rungs
    alive, before, num_steps = list(arms), 0, 0
    for rung in rungs:
        num_steps, before = num_steps + len(alive) * (rung - before), rung
        seen = {}
        for arm in alive:
            assert arms[arm].step >= rung, f"{arms[arm].name} is needed until step {rung}"
            seen[arm] = store.rewards(arm, compare.compared_steps(rung, rungs), rung)
        verdicts = compare.judge(seen, compare.COMBINED, halving, len(rungs))
        alive = [verdict.arm for verdict in verdicts if verdict.goes_on]
    num_steps += len(alive) * (length - before)
    last = {
        arm.id: store.rewards(arm.id, length - round(LAST_SHARE * length), length)
        for arm in arms.values()
        if arm.step == length
    }
    means = {arm: compare.mean(steps, compare.COMBINED) for arm, steps in last.items()}
    assert alive[0] in means, f"{arms[alive[0]].name} is needed until the end"
    best = max(means, key=lambda arm: means[arm])
    behind = None if best == alive[0] else compare.difference(last[best], last[alive[0]], compare.COMBINED)

    def described(arm: Arm) -> str:
        return f"{arm.changes['learning_rate']:g}, {arm.changes['loss_type']} ({means[arm.id]:.3f})"

    return {
        "found": described(arms[alive[0]]),
        "best": described(arms[best]),
        "behind": "the same" if behind is None else behind.text,
        "p_value": 1.0 if behind is None else behind.p_value,
        "lead": 0.0 if behind is None else behind.mean,
        "share": num_steps / (length * len(arms)),
    }


if __name__ == "__main__":
    sys.exit(main())
