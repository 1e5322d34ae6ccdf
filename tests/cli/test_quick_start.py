"""The commands of the quick start's pretrained model, as they stand in the page; training takes one step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from groupgrad.apps.runs.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
RUNNER = "<!-- run by: tests/cli/test_quick_start.py -->"
SHORTER = {
    "groupgrad check": "--prompts 1",
    "groupgrad train": "--max_steps 1 --eval_strategy no --eval_on_start false",
    "groupgrad view": "--export page.html",  # instead of a server
}


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_five_commands(smollm2, tmp_path):
    """`make test-real` has run the first one."""
    page = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    block = re.search(f"{RUNNER}\n```bash\n(.*?)```", page, re.DOTALL)
    assert block is not None
    commands = block[1].splitlines()
    assert len(commands) == 5 and commands[0] == "python examples/make_smollm2.py runs/smollm2"
    assert "python examples/make_smollm2.py $(REAL_MODEL)" in (ROOT / "Makefile").read_text(encoding="utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "smollm2").symlink_to(smollm2)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    for name, arguments in (("python", ""), ("groupgrad", "-m groupgrad")):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    printed = {}
    for command in commands[1:]:
        name = " ".join(command.split()[:2])
        run = subprocess.run(
            f"{command} {SHORTER.get(name, '')}",
            shell=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
        printed[name] = run.stdout
    assert "native" in printed["groupgrad env"] and "the round took" in printed["groupgrad check"]
    assert len(RunFolder(tmp_path / "runs" / "reasoning-gym").rows(1)) == 32
    assert (tmp_path / "page.html").stat().st_size > 100_000
