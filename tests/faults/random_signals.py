"""Sends signals at random moments to a run on two ranks, and counts what is lost.

    python tests/faults/random_signals.py --tries 100

Each try forks two ranks that train without an end, sends SIGTERM or SIGUSR1 to one of them or to both after a random
time, and compares the newest checkpoint with the last step that ended. A try has lost nothing if both ranks exit with
the code of a stopped run and the checkpoint is that step's or a later one's.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from groupgrad.stopping import EXIT_STOPPED

sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))
import ranks
from forked_ranks import forked_ranks, wait_for

FIRST_STEP_S = 60.0
"""Time that a run has for its first step."""

EXIT_S = 60.0
"""Time that a run has to end after a signal."""


class Steps(TrainerCallback):
    """Writes down each step that has ended."""

    def __init__(self, path: Path):
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._path.write_text(str(state.global_step))


def _train(rank: int, out: Path) -> None:
    trainer = ranks.build("signals", out, max_steps=10**6, beta=0.1, logging_steps=3)
    if rank == 0:
        trainer.add_callback(Steps(out / "steps"))
    trainer.train()


def attempt(stream: random.Random) -> str | None:
    """One try; what went wrong, or None."""
    out = Path(tempfile.mkdtemp(prefix="signals_"))
    steps = out / "steps"
    with forked_ranks(lambda rank: _train(rank, out), out) as both:
        wait_for(steps, FIRST_STEP_S)
        time.sleep(stream.uniform(0.0, 1.0))
        targets, name = stream.choice([[0, 1], [0], [1]]), stream.choice(["SIGTERM", "SIGUSR1"])
        for rank in targets:
            both.kill(rank, name)
        codes = both.wait(EXIT_S)
        for rank in range(2):
            both.kill(rank, "SIGABRT")  # has a rank that has not ended write its stacks
        both.wait(EXIT_S)
    last = int(steps.read_text() or 0) if steps.exists() else 0
    folders = [int(path.name.split("-")[1]) for path in (out / "run" / "signals").glob("checkpoint-*")]
    newest = max(folders, default=0)
    problem = None
    if codes != [EXIT_STOPPED] * 2 or newest < last:
        logs = "".join(both.log(rank)[-6000:] for rank in range(2))
        problem = f"{name} to {len(targets)} rank(s): exit codes {codes}, step {last}, checkpoint {newest}\n{logs}"
    shutil.rmtree(out, ignore_errors=True)
    return problem


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    stream, problems = random.Random(options.seed), []
    for number in range(options.tries):
        problem = attempt(stream)
        if problem is not None:
            problems.append(problem)
            print(f"try {number}: {problem}", flush=True)
    print(f"{options.tries} signals, {len(problems)} lost more than the step in progress or ended otherwise")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
