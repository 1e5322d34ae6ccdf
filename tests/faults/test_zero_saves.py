"""Saves of two processes under DeepSpeed ZeRO, killed, refused by a disk and resumed.

They need DeepSpeed, which is no part of the development environment: `pip install -e .[deepspeed]`, then
`python -m pytest -m slow tests/faults/test_zero_saves.py` (about four minutes on two cores, no GPU).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_on

from groupgrad.checkpoints.choosing import choose
from groupgrad.checkpoints.manifest import Manifest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

SCRIPT = Path(__file__).with_name("zero_saves.py")


def ending(out: Path, name: str) -> dict[str, Any]:
    """The ending of a run, which both ranks have."""
    first, second = (torch.load(out / f"{name}_{rank}.pt", weights_only=False) for rank in range(2))
    assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"])
    return first


@pytest.fixture(scope="module", params=[2, 3], ids=["stage_2", "stage_3"])
def runs(request, tmp_path_factory) -> tuple[Path, int]:
    """The folder of the runs that nothing killed, and their stage."""
    out = tmp_path_factory.mktemp(f"zero_{request.param}")
    run_on(2, SCRIPT, out, request.param, "whole", timeout_s=180)
    return out, request.param


def test_a_killed_save_is_resumed_bit_for_bit(runs):
    out, stage = runs
    with pytest.raises(AssertionError):
        run_on(2, SCRIPT, out, stage, "killed", timeout_s=180)
    run = out / "run" / "stopped"
    assert not (run / "checkpoint-3").exists()
    assert choose(run, True).folder.name == "checkpoint-2"
    run_on(2, SCRIPT, out, stage, "again", timeout_s=180)
    again, straight = ending(out, "stopped"), ending(out, "whole")
    assert list(again["weights"]) == list(straight["weights"])
    assert all(torch.equal(again["weights"][key], straight["weights"][key]) for key in straight["weights"])
    assert again["log"] == straight["log"] and len(straight["log"]) == 4
    assert again["folders"] == [f"checkpoint-{step}" for step in range(1, 5)]


def test_the_manifest_lists_the_files_of_both_ranks(runs):
    manifest = Manifest.read(runs[0] / "run" / "whole" / "checkpoint-2")
    assert manifest is not None and manifest.world_size == 2
    states = [name for name in manifest.files if name.endswith("optim_states.pt")]
    assert len(states) == 2 and {"groupgrad_state_0.pt", "groupgrad_state_1.pt", "latest"} <= set(manifest.files)
