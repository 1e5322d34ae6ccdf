"""Prints how far the final weights of several processes are from those of one, for each way of sharing the work.

    python bench/equality.py [--deepspeed .venv/deepspeed]

The runs are those that `test_processes.py`, `test_fsdp.py`, `test_context_parallel.py` and `test_zero.py` of
`tests/trainer` compare, on CPU processes (gloo) in float32. ZeRO runs with `--deepspeed` alone, the folder where
`make test-deepspeed` installs DeepSpeed. A difference is the largest of all ranks, the norm of the difference of all
weights over the norm of the weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS / "trainer")]
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

import fsdp_ranks  # noqa: E402
import test_context_parallel  # noqa: E402
import zero_ranks  # noqa: E402
from forked_ranks import on_ranks, script_on_ranks  # noqa: E402
from two_ranks import run_on  # noqa: E402

TIMEOUT_S = 1800.0
SAVED = ("saved", "saved_lora")
"""Cases of FSDP whose checkpoints the tests are about."""
CONTEXT = [*test_context_parallel.FAST, *test_context_parallel.SLOW]
ZERO = ("stage_1", "stage_2", "whole", "loaded", *zero_ranks.LOSSES, "flat_groups", "checkpointing", "lora")
Found = tuple[str, str, int, float]
"""Way, case, number of processes and difference."""


def processes(ranks: Any, out: Path) -> Iterator[Found]:
    """Data parallel."""
    script_on_ranks(2, TESTS / "trainer" / "ranks.py", out, timeout_s=TIMEOUT_S)
    script_on_ranks(2, TESTS / "trainer" / "ranks.py", out, "losses", timeout_s=TIMEOUT_S)
    for case in ranks.CASES:
        yield "data parallel", case, 2, difference(out, case, ranks.run(case, out / "one")["weights"])


def fsdp(ranks: Any, out: Path) -> Iterator[Found]:
    """FSDP 2."""
    cases = [case for case in fsdp_ranks.cases(ranks) if case not in SAVED]
    for number in (2, 4):
        folder = out / str(number)
        folder.mkdir()
        script = TESTS / "trainer" / "fsdp_ranks.py"
        script_on_ranks(number, script, folder, "from-start", *cases, timeout_s=TIMEOUT_S)
        for case in cases:
            # `bnpo` is defined by its micro-batch.
            split = {"micro_batches": number} if case == "bnpo" else {}
            trainer = fsdp_ranks.build(ranks, case, folder / "one", **split)
            trainer.train()
            yield "FSDP 2", case, number, difference(folder, case, ranks.HELP.weights(trainer.model), number)


def context_parallel(ranks: Any, out: Path) -> Iterator[Found]:
    """Groups of all processes that train each row together."""
    for number in (2, 4):
        folder = out / str(number)
        folder.mkdir()
        # Four processes would have fewer rows in the micro-batch by which `bnpo` is defined.
        cases = [case for case in CONTEXT if (number, case) != (4, "bnpo")]

        def weights(_rank: int, cases: Any = cases, folder: Path = folder, number: int = number) -> list[torch.Tensor]:
            return [test_context_parallel.run(ranks, case, folder / "ranks", number)["weights"] for case in cases]

        found = on_ranks(weights, folder, number, timeout_s=TIMEOUT_S, connect=False)
        for case, *several in zip(cases, *found):
            alone = test_context_parallel.run(ranks, case, folder / "one", 1)["weights"]
            yield "context parallel", case, number, largest(several, alone)


def zero(folder: Path, out: Path) -> Iterator[Found]:
    """DeepSpeed ZeRO, from the folder in which DeepSpeed is installed."""
    script = TESTS / "trainer" / "zero_ranks.py"
    path = os.pathsep.join(filter(None, [str(folder.resolve()), os.environ.get("PYTHONPATH")]))
    run_on(1, script, out, "plain", *ZERO, timeout_s=TIMEOUT_S)
    run_on(2, script, out, "zero", *ZERO, timeout_s=TIMEOUT_S, PYTHONPATH=path)
    stages = {"stage_1": "ZeRO-1", "stage_2": "ZeRO-2"}
    for case in ZERO:
        alone = torch.load(out / f"plain_{case}_0.pt", weights_only=False)["weights"]
        yield stages.get(case, "ZeRO-3"), case, 2, difference(out, f"zero_{case}", vector(alone))


def difference(out: Path, name: str, alone: torch.Tensor, num_ranks: int = 2) -> float:
    """The largest relative difference of the ranks' weights, which they have stored under a name."""
    files = [out / f"{name}_{rank}.pt" for rank in range(num_ranks)]
    return largest([torch.load(file, weights_only=False)["weights"] for file in files], alone)


def largest(ranks: Sequence[Any], alone: torch.Tensor) -> float:
    """The largest relative difference of the ranks' weights from these."""
    return max(float((vector(weights) - alone).norm() / alone.norm()) for weights in ranks)


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
        folders = [Path(root) / name for name in ("processes", "fsdp", "context", "zero")]
        for folder in folders:
            folder.mkdir()
        found = [
            *processes(ranks, folders[0]),
            *fsdp(ranks, folders[1]),
            *context_parallel(ranks, folders[2]),
        ]
        if arguments.deepspeed is not None:
            found += zero(arguments.deepspeed, folders[3])
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for way, case, number, gap in found:
        rows.setdefault((way, case), {})[number] = f"{gap:.1e}"
    print("| way | case | 2 processes | 4 processes |\n|---|---|---:|---:|")
    for (way, case), gaps in rows.items():
        print(f"| {way} | `{case}` | {gaps.get(2, '')} | {gaps.get(4, '')} |")


if __name__ == "__main__":
    main()
