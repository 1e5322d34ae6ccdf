"""Prints how unequal the work of ranks is before and after rows are moved between them, on the benchmark's lengths.

    python bench/rank_balance.py [--steps N]

Each rank samples a step's rows of a workload; completion lengths are geometric as in `workloads.py`, and in `reasoning`
every second group has no advantage, so its rows need no pass. The columns: the slowest rank's cost over the mean of
all ranks (1.00: all end at the same time), averaged over steps and in the worst step, before and after; the slowest
rank's cost after over that before (groups that are brought together compute their prompt once); the share of rows that
move; and the milliseconds in which a rank finds the assignment. Costs are in forward passes of one token.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from workloads import WORKLOADS, Workload

from groupgrad.batching.packing import RowCost, total_cost
from groupgrad.batching.rank_balance import assign_to_ranks

BACKWARD = 3
"""Cost of a token that is trained, in forward passes."""
GSM8K_PROMPT = 110
"""Tokens of a prompt where the workload's prompts have their own lengths."""


def step_costs(workload: Workload, num_ranks: int, rng: np.random.Generator, mixed: bool) -> list[RowCost]:
    """Costs of the rows of a step, in the order of the ranks; `mixed`: rows are dealt to steps one by one."""
    size = workload.num_generations
    num_rows = workload.batch_rows * num_ranks
    lengths = np.full(num_rows, workload.limit)
    if workload.mean_length is not None:
        lengths = np.minimum(rng.geometric(1 / workload.mean_length, size=num_rows), workload.limit)
    groups = np.arange(num_rows * (2 if mixed else 1)) // size
    chosen = np.sort(rng.permutation(len(groups))[:num_rows]) if mixed else np.arange(num_rows)
    prompt = workload.prompt_tokens or GSM8K_PROMPT
    costs = []
    for row, length in zip(chosen, lengths):
        weight = 0 if workload.half_flat and groups[row] % 2 else BACKWARD
        costs.append(RowCost(int(weight * length), weight * prompt, int(groups[row])))
    return costs


def loads(costs: list[RowCost], ranks: list[int], num_ranks: int) -> np.ndarray:
    """The cost of each rank."""
    return np.array([total_cost(c for c, rank in zip(costs, ranks) if rank == place) for place in range(num_ranks)])


def main() -> None:
    """Prints a table of all workloads whose rows have unlike costs."""
    parser = argparse.ArgumentParser(description="Print the balance of ranks before and after rows are moved.")
    parser.add_argument("--steps", type=int, default=50, help="steps that are drawn for each row of the table")
    steps = parser.parse_args().steps
    print("| workload | ranks | rows | before | worst | after | worst | slowest rank | moved | ms |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for workload in WORKLOADS.values():
        for num_ranks in (2, 4, 8, 32):
            for mixed in (False, True):
                print(table_row(workload, num_ranks, mixed, steps), flush=True)


def table_row(workload: Workload, num_ranks: int, mixed: bool, steps: int) -> str:
    """The figures of a workload on this many ranks."""
    rng = np.random.default_rng(0)
    before, after, gain, moved, seconds = [], [], [], [], []
    for _ in range(steps):
        costs = step_costs(workload, num_ranks, rng, mixed)
        holders = [row // workload.batch_rows for row in range(len(costs))]
        started = time.perf_counter()
        chosen = assign_to_ranks(costs, holders, num_ranks, workload.micro_batches)
        seconds.append(time.perf_counter() - started)
        first, second = loads(costs, holders, num_ranks), loads(costs, chosen, num_ranks)
        before.append(first.max() / first.mean())
        after.append(second.max() / second.mean())
        gain.append(second.max() / first.max())
        moved.append(np.mean(np.array(chosen) != holders))
    return (
        f"| {workload.name} | {num_ranks} | {'any' if mixed else 'whole groups'} | {np.mean(before):.2f} | "
        f"{max(before):.2f} | {np.mean(after):.2f} | {max(after):.3f} | {np.mean(gain):.2f} | {np.mean(moved):.0%} | "
        f"{1000 * np.median(seconds):.0f} |"
    )


if __name__ == "__main__":
    main()
