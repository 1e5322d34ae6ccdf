"""A script run by two processes that know of each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def run_on_two(script: Path, *arguments: object, timeout_s: float, **environment: str) -> None:
    """Run `script` to its end on two CPU ranks; AssertionError with what they wrote if one of them fails.

    `environment` goes before the variables that there are.
    """
    process = subprocess.Popen(
        [sys.executable, *_LAUNCHER, str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, said = process.communicate(timeout=timeout_s)
    except BaseException:
        # Killed, the launcher would leave its ranks behind; told to end, it ends them.
        process.terminate()
        process.communicate()
        raise
    assert process.returncode == 0, said[-6000:]
