"""Runs a script on two ranks, or on more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


def run_on_two(script: Path, *arguments: object, timeout_s: float, **environment: str) -> None:
    """Runs `script` on two CPU ranks; AssertionError with their output if one of them fails.

    `environment` overrides variables of this process.
    """
    run_on(2, script, *arguments, timeout_s=timeout_s, **environment)


def run_on(num_ranks: int, script: Path, *arguments: object, timeout_s: float, **environment: str) -> None:
    """Runs `script` on CPU ranks; AssertionError with their output if one of them fails.

    `environment` overrides variables of this process.
    """
    process = subprocess.Popen(
        [sys.executable, *_LAUNCHER, str(num_ranks), str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, output = process.communicate(timeout=timeout_s)
    except BaseException:
        # SIGTERM makes the launcher end its ranks; SIGKILL would leave them running.
        process.terminate()
        process.communicate()
        raise
    assert process.returncode == 0, output[-6000:]
