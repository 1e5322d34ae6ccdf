"""The curves of a program: `examples/programs/curves.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, pathlib, sys
model, folder, *settings = sys.argv[1:]
assert (model, settings[1:]) == ("a model", ["logging_steps=1", "max_steps=30"]), sys.argv
seed = int(settings[0].removeprefix("seed="))
rewards = [0.1 + 0.01 * seed + 0.02 * step for step in range(30)]
lines = [json.dumps({"step": step, "reward": reward}) for step, reward in enumerate(rewards)] + ['{"train_loss": 1}']
(pathlib.Path(folder) / "metrics.jsonl").write_text("\\n".join(lines))
"""


def test_three_seeds_are_drawn_and_tested(tmp_path: Path) -> None:
    """Each seed's mean of ten steps rises by 20 x 0.02, so that the test has no deviation beyond rounding."""
    program, picture = tmp_path / "program.py", tmp_path / "picture.png"
    program.write_text(PROGRAM)
    command = [sys.executable, ROOT / "examples/programs/curves.py", program, "a model", picture, "max_steps=30"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    *seeds, end = run.stdout.splitlines()
    assert seeds[1] == "seed 1: 20.0% in the first 10 steps, 60.0% in the last 10 of 30" and len(seeds) == 3
    assert float(end.removeprefix("p = ")) < 1e-6
    assert picture.read_bytes().startswith(b"\x89PNG")
