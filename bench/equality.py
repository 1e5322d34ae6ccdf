"""Prints how far the final weights of two processes are from those of one, for each way of sharing the work.

    python bench/equality.py [--deepspeed .venv/deepspeed]

The runs are those that `tests/trainer/test_processes.py`, `test_fsdp.py` and `test_zero.py` compare, on CPU processes
(gloo) in float32. ZeRO runs with `--deepspeed` alone, the folder where `make test-deepspeed` installs DeepSpeed.
A difference is the largest of all ranks, the norm of the difference of all weights over the norm of the weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS / "trainer")]
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

import fsdp_ranks  # noqa: E402
from forked_ranks import script_on_ranks  # noqa: E402
from two_ranks import run_on  # noqa: E402

TIMEOUT_S = 1800.0
SAVED = ("saved", "saved_lora")
"""Cases of FSDP whose checkpoints the tests are about."""
ZERO = ("stage_1", "stage_2", "whole", "loaded", "flat_groups", "checkpointing", "lora")
Found = tuple[str, str, float]


def processes(ranks: Any, out: Path) -> Iterator[Found]:
    """Data parallel."""
    script_on_ranks(2, TESTS / "trainer" / "ranks.py", out, timeout_s=TIMEOUT_S)
    script_on_ranks(2, TESTS / "trainer" / "ranks.py", out, "losses", timeout_s=TIMEOUT_S)
    for case in ranks.CASES:
        yield "data parallel", case, difference(out, case, ranks.run(case, out / "one")["weights"])


def fsdp(ranks: Any, out: Path) -> Iterator[Found]:
    """FSDP 2."""
    cases = [case for case in fsdp_ranks.cases(ranks) if case not in SAVED]
    script_on_ranks(2, TESTS / "trainer" / "fsdp_ranks.py", out, "from-start", *cases, timeout_s=TIMEOUT_S)
    for case in cases:
        # `bnpo` is defined by its micro-batch.
        split = {"micro_batches": 2} if case == "bnpo" else {}
        trainer = fsdp_ranks.build(ranks, case, out / "one", **split)
        trainer.train()
        yield "FSDP 2", case, difference(out, case, ranks.HELP.weights(trainer.model))


def zero(folder: Path, out: Path) -> Iterator[Found]:
    """DeepSpeed ZeRO, from the folder in which DeepSpeed is installed."""
    script = TESTS / "trainer" / "zero_ranks.py"
    path = os.pathsep.join(filter(None, [str(folder.resolve()), os.environ.get("PYTHONPATH")]))
    run_on(1, script, out, "plain", *ZERO, timeout_s=TIMEOUT_S)
    run_on(2, script, out, "zero", *ZERO, timeout_s=TIMEOUT_S, PYTHONPATH=path)
    stages = {"stage_1": "ZeRO-1", "stage_2": "ZeRO-2"}
    for case in ZERO:
        alone = torch.load(out / f"plain_{case}_0.pt", weights_only=False)["weights"]
        yield stages.get(case, "ZeRO-3"), case, difference(out, f"zero_{case}", vector(alone))


def difference(out: Path, name: str, alone: torch.Tensor) -> float:
    """The largest relative difference of the two ranks' weights, which they have stored under a name."""
    found = [torch.load(out / f"{name}_{rank}.pt", weights_only=False)["weights"] for rank in range(2)]
    return max(float((vector(weights) - alone).norm() / alone.norm()) for weights in found)


def vector(weights: Any) -> torch.Tensor:
    """All weights of a model as one tensor of float64."""
    parts = weights.values() if isinstance(weights, dict) else [weights]
    return torch.cat([part.double().flatten() for part in parts])


def main() -> None:
    """Makes the runs, and prints the table when all have ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", type=Path, metavar="FOLDER", help="where DeepSpeed is installed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = fsdp_ranks.load_ranks()
    with tempfile.TemporaryDirectory() as root, redirect_stdout(sys.stderr):
        folders = [Path(root) / name for name in ("processes", "fsdp", "zero")]
        for folder in folders:
            folder.mkdir()
        found = [*processes(ranks, folders[0]), *fsdp(ranks, folders[1])]
        if arguments.deepspeed is not None:
            found += zero(arguments.deepspeed, folders[2])
    print("| way | case | difference |\n|---|---|---:|")
    for way, case, gap in found:
        print(f"| {way} | `{case}` | {gap:.1e} |")


if __name__ == "__main__":
    main()
