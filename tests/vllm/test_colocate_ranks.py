"""Colocated vLLM in several training processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_vllm import SETTINGS


@pytest.mark.slow
@pytest.mark.parametrize("how", [("1", "transformers"), ("2", "vllm")])
def test_each_rank_samples_its_own_rows(how: tuple[str, str], folder: Path, tmp_path: Path) -> None:
    """`how`: the size of tensor-parallel groups, and `model_impl`."""
    shutil.copytree(folder, tmp_path / "model")
    here = Path(__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(here.with_name("ranks_worker.py")), str(tmp_path / "model"), *how],
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(here.parents[1] / "helpers")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = [(tmp_path / "model" / f"rank-{rank}").read_text() for rank in range(2)]
    assert written == ["2 rows", "6 rows"]
