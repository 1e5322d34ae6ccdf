"""Measures sampling and training of one group of long rows against their floors, and the memory that they take.

    python bench/long_rows.py [--lengths 1024 4096 8192] [--rows 4] [--rounds 3] [--part both|sampling|training|step]

The model has 14 million parameters, the group four rows behind a prompt of 64 tokens. A training pass takes one row, as
the trainer cuts such a group, and rows of 4,096 tokens give large tensors back at once, as in the trainer. Floors are
those of `floor.py`; attention counts at the rate of large products. Each length runs in a process of its own, whose
peak memory above the model's is printed. `--part step` times one decode step behind rows of the length, which is short
enough to repeat often, against reading all weights, keys and values once.

The machine's rates change within minutes, so they are measured before and after each round, which is compared with
their mean; the round with the median share is printed. Memory is read from a buffer as large as what a step reads (on
average over the steps, for sampling): a smaller one may stay in a cache that the step's own data do not fit into. The
rate of 128 MB, by which earlier floors were computed, is printed beside it.
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
from dataclasses import dataclass

if __name__ == "__main__":  # before torch comes; whoever only imports this keeps his environment
    os.environ.setdefault("OMP_NUM_THREADS", "2")

import psutil
import torch
from floor import BYTES, Machine, Reading, product_gflops, reading_gigabytes, sampling_floor, training_floor
from materials import NEVER, make_model, make_words, set_ending
from workloads import GroupWork, ModelShape

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import huge_pages
from groupgrad.engines.native.attention_plans import DecodeBatch, ProbePlan
from groupgrad.engines.native.cpp_step import CompiledModel, CompiledStep
from groupgrad.engines.native.direct_step import direct_model
from groupgrad.engines.native.engine import NativeEngine
from groupgrad.engines.native.kv_cache import KVCache, LayerShape, Need
from groupgrad.engines.native.logits import last_logits
from groupgrad.memory.heap import large_tensors_mapped
from groupgrad.memory.memory_guards import LONG_ROW
from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens

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


@dataclass(slots=True, frozen=True)
class Round:
    """Seconds of the clock and of processors, and the floor by rates of the same moments."""

    wall: float
    processor: float
    floor: float
    rate: float
    """10^9 operations or bytes a second, by which the floor was computed."""


def median_round(function: Callable[[], object], floor: Callable[[], tuple[float, float]], rounds: int) -> Round:
    """The round with the median share of its floor; `floor()` measures the floor and its rate, between all rounds."""
    found, before = [], floor()
    for _ in range(rounds):
        started, used = time.perf_counter(), time.process_time()
        function()
        wall, processor = time.perf_counter() - started, time.process_time() - used
        after = floor()
        found.append(Round(wall, processor, *((x + y) / 2 for x, y in zip(before, after))))
        before = after
    return sorted(found, key=lambda x: x.floor / x.wall)[rounds // 2]


def reading_of(num_bytes: float) -> Reading:
    """Memory of about so many bytes, on pages of the size that keys and values have."""
    size = (int(num_bytes) // BYTES // 4096, 4096)
    return Reading(huge_pages.zeros(size, torch.float32, torch.device("cpu")).fill_(1.0))


def rate_of_128_megabytes() -> str:
    """Measures how fast 128 MB are read; a text for the printed line, with the load of the machine."""
    return f"128 MB at {reading_gigabytes(0.5, 128):.0f} GB/s, load {os.getloadavg()[0]:.1f}"


@torch.inference_mode()
def measure_step(length: int, num_rows: int) -> None:
    """Prints a line for the decode step of rows that have `length` tokens behind their prompt."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = make_model(SHAPE, make_words(SHAPE.vocab_size), max_length=length + PROMPT + 1).eval()
    probe, token = ProbePlan(), torch.zeros(1, dtype=torch.int64)
    last_logits(model, token, token, probe, token)
    compiled = direct_model(model, probe.calls)
    assert isinstance(compiled, CompiledModel), "this machine compiles no kernels"
    width, cpu = SHAPE.head_dim, torch.device("cpu")
    layers = {i: LayerShape(SHAPE.num_kv_heads, width, width, torch.float32, cpu) for i in range(SHAPE.num_layers)}
    cache = KVCache(layers, 2**40)
    cache.reserve(Need(num_rows, length + 1, 1, PROMPT, max_suffix_length=length + 1), Need(0, 0, 0, 0))
    for buffer in (cache.suffixes, cache.prompts):
        for tensor in (x for pair in buffer.tensors.values() for x in pair):
            tensor.normal_()
    step = CompiledStep(compiled, cache, DecodeBatch([0] * num_rows, [PROMPT] * num_rows, [length] * num_rows))
    tokens, positions = torch.full((num_rows,), 5), torch.full((num_rows,), PROMPT + length)
    stored = cache.suffixes.capacity + cache.prompts.capacity
    num_bytes = BYTES * sum(p.numel() for p in model.parameters()) + stored * cache.bytes_per_token
    reading = reading_of(num_bytes)

    def floor() -> tuple[float, float]:
        rate = reading.gigabytes(0.0)
        return num_bytes / rate / 1e9, rate

    found = median_round(lambda: step(tokens, positions), floor, 101)
    print(
        f"{num_rows} x {length:,} tokens, a decode step: {1e3 * found.wall:.2f} ms ({1e3 * found.processor:.2f} ms of "
        f"processors), floor {1e3 * found.floor:.2f} ms, {found.floor / found.wall:.0%} of it ({found.rate:.0f} GB/s "
        f"in turn; {rate_of_128_megabytes()})",
        flush=True,
    )


def measure(length: int, num_rows: int, rounds: int, part: str) -> None:
    """Prints a line for sampling and one for training of rows of `length` tokens."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = make_model(SHAPE, make_words(SHAPE.vocab_size), max_length=length + PROMPT)
    numbers = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * (PROMPT + num_rows * length / 2)
    reading = reading_of(BYTES * (sum(p.numel() for p in model.parameters()) + numbers))
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

    def training() -> tuple[float, float]:
        machine = Machine(product_gflops(0.5, 2048), None, 1.0)
        return training_floor(SHAPE, machine, groups), machine.gflops

    def sampling() -> tuple[float, float]:
        machine = Machine(product_gflops(0.5, 2048), None, reading.gigabytes(0.5))
        return sampling_floor(SHAPE, machine, groups), machine.gigabytes_per_second

    for name, function, floor, unit in (
        ("training", train, training, "GFLOP/s"),
        ("sampling", sample, sampling, "GB/s"),
    ):
        if part in ("both", name):
            found = median_round(function, floor, rounds)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
            of_processors = found.floor * torch.get_num_threads() / found.processor
            print(
                f"{num_rows} x {length:,} tokens, {name}: {found.wall:.2f} s ({found.processor:.2f} s of processors), "
                f"floor {found.floor:.2f} s, {found.floor / found.wall:.0%} of it ({of_processors:.0%} of processors), "
                f"peak {peak / MEGABYTE:,.0f} MB above the model ({found.rate:.0f} {unit} in turn; "
                f"{rate_of_128_megabytes()})",
                flush=True,
            )


def main() -> None:
    """Measures each length in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("both", "sampling", "training", "step"), default="both")
    options = parser.parse_args()
    if len(options.lengths) == 1:
        if options.part == "step":
            measure_step(options.lengths[0], options.rows)
        else:
            measure(options.lengths[0], options.rows, options.rounds, options.part)
        return
    for length in options.lengths:
        sizes = ["--lengths", str(length), "--rows", str(options.rows), "--rounds", str(options.rounds)]
        subprocess.run([sys.executable, __file__, *sizes, "--part", options.part], check=True)


if __name__ == "__main__":
    main()
