"""Times optimizer steps whose gradients are sent during the last backward pass, and after it, in turn.

    python bench/gradient_overlap.py [--processes 2] [--steps 12] [--layers 12] [--width 1024]

Processes of one thread each (gloo, CPUs) train a stack of linear layers by one backward pass a step. Printed are the
median seconds of both ways, the median of their ratio over pairs of neighbouring steps, and its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.multiprocessing
from torch import nn

from groupgrad.trainer.gradient_sync import GradientSync


def time_steps(rank: int, options: Any, store: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.processes)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(options.layers)))
    states = torch.randn(options.rows, options.width)
    ways = {name: GradientSync(model, overlaps=name == "during") for name in ("during", "after")}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(options.steps + 1):
        for name, sync in sorted(ways.items(), reverse=step % 2 == 1):
            torch_dist.barrier()
            started = time.perf_counter()
            with sync.micro_batch(is_last=True), sync.backward_pass(is_last=True):
                model(states).square().mean().backward()
            if step:  # the first step of either sends after the pass
                seconds[name].append(time.perf_counter() - started)
            model.zero_grad()
    if rank == 0:
        ratios = [during / after for during, after in zip(seconds["during"], seconds["after"])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        print(
            f"{medians['during']:.3f} s during the pass, {medians['after']:.3f} s after it; "
            f"ratio {middle:.2f} (quartiles {low:.2f} to {high:.2f}), {len(ratios)} pairs of steps, "
            f"{sum(p.nbytes for p in model.parameters()) / 2**20:.0f} MiB of gradients"
        )
    torch_dist.destroy_process_group()


def main() -> None:
    """Starts the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("processes", 2), ("steps", 12), ("layers", 12), ("width", 1024), ("rows", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # forked, so that torch is imported once
        arguments = options, f"{folder}/store"
        torch.multiprocessing.start_processes(time_steps, arguments, options.processes, start_method="fork")


if __name__ == "__main__":
    main()
