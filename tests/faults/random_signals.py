"""Sends signals at random moments to a run on two ranks, and counts what is lost.

    python tests/faults/random_signals.py --tries 100

Each try forks two ranks that train without an end, sends SIGTERM or SIGUSR1 to one of them or to both after a random
time, and compares the newest checkpoint with the last step that ended. A try has lost nothing if both ranks exit with
the code of a stopped run and the checkpoint is that step's or a later one's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from groupgrad.stopping import EXIT_STOPPED

FIRST_STEP_S = 60.0
"""Time that a run has for its first step."""

EXIT_S = 30.0
"""Time that a run has to end after a signal."""


def _ranks_module() -> Any:
    path = Path(__file__).parent.parent / "trainer" / "ranks.py"
    spec = importlib.util.spec_from_file_location("ranks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Steps(TrainerCallback):
    """Writes down each step that has ended."""

    def __init__(self, path: Path):
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._path.write_text(str(state.global_step))


def _train(ranks: Any, rank: int, port: int, out: Path) -> None:
    """One rank, in a process of its own; ends with the exit code of the run."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    code = 1
    with (out / f"rank_{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            trainer = ranks.build("signals", out, max_steps=10**6, beta=0.1, logging_steps=3)
            if rank == 0:
                trainer.add_callback(Steps(out / "steps"))
            trainer.train()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        except BaseException:
            traceback.print_exc()
        log.flush()
    os._exit(code)


def _wait(children: list[int], seconds: float) -> list[int | None]:
    """Exit codes of the children; None for one that had to be killed."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(children) and time.monotonic() < end:
        for child in set(children) - set(codes):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in set(children) - set(codes):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        codes[child] = None
    return [codes[child] for child in children]


def attempt(ranks: Any, stream: random.Random) -> str | None:
    """One try; what went wrong, or None."""
    out = Path(tempfile.mkdtemp(prefix="signals_"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            _train(ranks, rank, port, out)
        children.append(child)
    steps, start = out / "steps", time.monotonic()
    while not steps.exists() and time.monotonic() < start + FIRST_STEP_S:
        time.sleep(0.01)
    time.sleep(stream.uniform(0.0, 1.0))
    targets = stream.choice([children, children[:1], children[1:]])
    name = stream.choice(["SIGTERM", "SIGUSR1"])
    for child in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, getattr(signal, name))
    codes = _wait(children, EXIT_S)
    last = int(steps.read_text() or 0) if steps.exists() else 0
    folders = [int(path.name.split("-")[1]) for path in (out / "run" / "signals").glob("checkpoint-*")]
    newest = max(folders, default=0)
    problem = None
    if codes != [EXIT_STOPPED] * 2 or newest < last:
        logs = "".join((out / f"rank_{rank}.log").read_text()[-1500:] for rank in range(2))
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
    ranks, stream, problems = _ranks_module(), random.Random(options.seed), []
    for number in range(options.tries):
        problem = attempt(ranks, stream)
        if problem is not None:
            problems.append(problem)
            print(f"try {number}: {problem}", flush=True)
    print(f"{options.tries} signals, {len(problems)} lost more than the step in progress or ended otherwise")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
