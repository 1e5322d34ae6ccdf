"""Two processes under DeepSpeed ZeRO, stages 1, 2 and 3, compute what two of plain data parallelism compute.

They need DeepSpeed, which is no part of the development environment: `pip install -e .[deepspeed]`, then
`python -m pytest -m slow tests/trainer/test_zero.py` (three to five minutes on two cores, no GPU).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_ranks
from forked_ranks import run_on
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

SCRIPT = Path(__file__).with_name("zero_ranks.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of both kinds of runs."""
    out = tmp_path_factory.mktemp("zero")
    for kind in ("plain", "zero"):
        run_on(2, SCRIPT, out, kind, timeout_s=900)
    return out


def result(out: Path, kind: str, case: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(out / f"{kind}_{case}_{rank}.pt", weights_only=False)


def vector(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in weights.values()])


@pytest.mark.parametrize("case", [case for case in zero_ranks.CASES if case != "too_large"])
def test_zero_is_data_parallelism(out, tools, case):
    """Weights to 1e-5 relative and equal on both ranks, every logged number to 1e-5, evaluation included."""
    plain, zero, other = result(out, "plain", case), result(out, "zero", case), result(out, "zero", case, 1)
    assert list(zero["weights"]) == list(plain["weights"])
    assert torch.equal(vector(zero["weights"]), vector(other["weights"]))
    assert tools.relative(vector(zero["weights"]), vector(plain["weights"])) < 1e-5
    # What is known from sampling is computed again under ZeRO-3, and no gap to it is measured.
    # Parameters that are always whole are not gathered, and keep ZeRO's hooks, which want the modules to be called.
    keeps_hooks = [f"{of}sampling/path/" for of in ("", "eval_one_", "eval_five_")] if case == "small" else []
    tools.assert_like(zero["log"], plain["log"], 1e-5, without=keeps_hooks, optional=["sampling/logp_mismatch"])
    if case == "cut":
        assert zero["passes"] == other["passes"] > 4, "more than those of two steps of two micro-batches"
    if case == "by_need":
        assert zero["recomputes"] and other["recomputes"], "though rank 1 alone has no memory"


def test_a_run_is_resumed_bit_for_bit(out):
    zero = result(out, "zero", "resumed")
    assert torch.equal(vector(zero["again"]), vector(zero["weights"]))
    assert zero["again_log"][:-1] == zero["log"][:-1]


def test_what_is_saved_is_whole(out):
    saved = AutoModelForCausalLM.from_pretrained(out / "zero" / "loaded" / "final")
    assert torch.equal(vector(dict(saved.named_parameters())), vector(result(out, "zero", "loaded")["weights"]))


def test_a_model_that_takes_images_is_saved_as_other_programs_read_it(out):
    saved = AutoModelForImageTextToText.from_pretrained(out / "zero" / "images" / "final")
    assert torch.equal(vector(dict(saved.named_parameters())), vector(result(out, "zero", "images")["weights"]))


def test_a_pass_that_does_not_fit_ends_both(out):
    first, second = (result(out, "zero", "too_large", rank)["error"] for rank in range(2))
    assert re.match(r"RuntimeError: a pass .* does not fit .* one of the 2 processes .*max_tokens_per_pass=\d", second)
    assert re.match(r"RankError: stopped because rank 1.* failed with RuntimeError: a pass .* does not fit", first)


def test_a_push_that_fails_on_one_rank_ends_both(out):
    first, second = (result(out, "zero", "failing", rank)["error"] for rank in range(2))
    assert first == "ConnectionError: the server is gone"
    assert second == "RankError: stopped because rank 0 failed with ConnectionError: the server is gone"


LOAD = """
import sys
from groupgrad import GRPOConfig
from groupgrad.kernels import extension_lock

extension_lock.LEFT_S = 0.0
GRPOConfig(output_dir=sys.argv[1], use_cpu=True, deepspeed={"zero_optimization": {"stage": 2}})
from deepspeed.accelerator import get_accelerator

get_accelerator().create_op_builder("ShareMemCommBuilder").load()
"""
"""Has DeepSpeed load its extension for sums over the processes of a CPU, as it does when they meet."""


def test_the_lock_of_a_compilation_that_was_killed_is_an_error_that_names_it(tmp_path):
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    command = [sys.executable, "-c", LOAD, str(tmp_path / "run")]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    process = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 1
    assert f"RuntimeError: the file {lock} says that a process compiles an extension of torch" in process.stderr
