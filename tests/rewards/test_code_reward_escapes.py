"""Attempts to break out of the sandbox of `code_reward`, with every mechanism that holds on this machine.

`python tests/helpers/sandbox_escapes.py` prints the figures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import cloudpickle
import pytest
import sandbox_escapes

from groupgrad.integrations.code_sandbox.sandbox import MECHANISMS

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_leaves_the_sandbox():
    python = sandbox_escapes.holding("auto")
    tries = sandbox_escapes.try_all(python=python, quick=True)
    assert not tries.escaped


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_escape_with_every_mechanism(mechanism):
    tries = sandbox_escapes.try_all(mechanism, sandbox_escapes.holding(mechanism))
    print(f"{mechanism}, uid {os.getuid()}: {tries.count} escapes tried, {len(tries.escaped)} escaped")
    assert not tries.escaped


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, to become another user")
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_escape_as_a_user(mechanism):
    python = "/usr/bin/python3"
    become = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"]
    script = [python, str(ROOT / "tests/helpers/sandbox_escapes.py"), "--mechanism", mechanism, "--python", python]
    packages = Path(cloudpickle.__file__).parents[1]
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{packages}", "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [*become, *script], env=paths, cwd="/", capture_output=True, text=True, timeout=200, check=False
    )
    if "SandboxError" in ended.stderr or "Permission denied" in ended.stderr:
        pytest.skip(ended.stderr.strip().splitlines()[-1])
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 escaped" in ended.stdout
