"""Measures sampling and training of one group of long rows against their floors, and the memory that they take.

    python bench/long_rows.py [--lengths 1024 4096 8192] [--rows 4] [--rounds 3] [--part both|sampling|training]

The model has 14 million parameters, the group four rows behind a prompt of 64 tokens. A training pass takes one row, as
the trainer cuts such a group, and rows of 4,096 tokens give large tensors back at once, as in the trainer. Floors are
those of `floor.py`; attention counts at the rate of large products. Each length runs in a process of its own, whose
peak memory above the model's is printed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

if __name__ == "__main__":  # before torch comes; whoever only imports this keeps his environment
    os.environ.setdefault("OMP_NUM_THREADS", "2")

import psutil
import torch
from floor import measure_machine, sampling_floor, training_floor
from materials import NEVER, make_model, make_words, set_ending
from workloads import GroupWork, ModelShape

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native.engine import NativeEngine
from groupgrad.modeling.scoring.forward import ForwardOptions, build_batch, score_tokens
from groupgrad.modeling.systems.heap import large_tensors_mapped
from groupgrad.modeling.systems.memory_guards import LONG_ROW

SHAPE = ModelShape(
    vocab_size=8192,
    hidden_size=384,
    num_layers=6,
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1152,
    tied=True,
)
PROMPT = 64
MEGABYTE = 2**20


def timed(function: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of the clock and of processors."""
    found = []
    for _ in range(rounds):
        started, used = time.perf_counter(), time.process_time()
        function()
        found.append((time.perf_counter() - started, time.process_time() - used))
    return sorted(found)[rounds // 2]


def measure(length: int, num_rows: int, rounds: int, part: str) -> None:
    """Prints a line for sampling and one for training of rows of `length` tokens."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    machine = measure_machine(0.5, megabytes=128)
    model = make_model(SHAPE, make_words(SHAPE.vocab_size), max_length=length + PROMPT)
    set_ending(model, 1, NEVER)
    generator = torch.Generator().manual_seed(0)
    prompt, *rows = (torch.randint(2, 8192, (n,), generator=generator).tolist() for n in [PROMPT, *[length] * num_rows])
    groups = [GroupWork(PROMPT, (length,) * num_rows)]
    before = psutil.Process().memory_info().rss

    def sample() -> None:
        options = SamplingOptions(max_new_tokens=length, eos_ids=(1,))
        NativeEngine(model.eval()).sample([Request(prompt, row, length) for row in range(num_rows)], options)

    def train() -> None:
        model.train().zero_grad()
        for ids in rows:
            with large_tensors_mapped() if PROMPT + length >= LONG_ROW else nullcontext():
                scores = score_tokens(model, build_batch([prompt], [0], [ids]), ForwardOptions(layout="shared"))
                (scores.logprobs * torch.linspace(-1, 1, length)).sum().backward()
                del scores

    floors = {"training": (train, training_floor), "sampling": (sample, sampling_floor)}
    for name, (function, floor_of) in floors.items():
        if part in ("both", name):
            wall, processor = timed(function, rounds)
            floor = floor_of(SHAPE, machine, groups)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
            threads, gflops = torch.get_num_threads(), machine.gflops
            print(
                f"{num_rows} x {length:,} tokens, {name}: {wall:.2f} s ({processor:.2f} s of processors), floor "
                f"{floor:.2f} s, {floor / wall:.0%} of it ({floor * threads / processor:.0%} of processors), peak "
                f"{peak / MEGABYTE:,.0f} MB above the model ({gflops:.0f} GFLOP/s, load {os.getloadavg()[0]:.1f})",
                flush=True,
            )


def main() -> None:
    """Measures each length in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("both", "sampling", "training"), default="both")
    options = parser.parse_args()
    if len(options.lengths) == 1:
        measure(options.lengths[0], options.rows, options.rounds, options.part)
        return
    for length in options.lengths:
        sizes = ["--lengths", str(length), "--rows", str(options.rows), "--rounds", str(options.rounds)]
        subprocess.run([sys.executable, __file__, *sizes, "--part", options.part], check=True)


if __name__ == "__main__":
    main()
