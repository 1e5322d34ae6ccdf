"""Prints how unequal the seconds of ranks are, where rows are long and attention costs more than linear layers do.

    python bench/rank_seconds.py [--ranks 4] [--rows 8] [--mean 1500] [--longest 8192] [--model small|wide]

Each row's forward and backward pass is timed once, alone, in seconds of the processor; a rank's seconds are the sum of
its rows'. Printed is the slowest rank over the mean of all, for the rows as they were sampled, and after they were
given to ranks by their tokens, and by their tokens and what attention costs for each (`attention_cost`).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from long_rows import PROMPT, SHAPE
from materials import make_model, make_words
from workloads import ModelShape

from groupgrad.batching.packing import row_costs
from groupgrad.batching.rank_balance import assign_to_ranks
from groupgrad.objectives import FORWARD_AND_BACKWARD
from groupgrad.scoring.attention_cost import attention_cost
from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens

GROUP = 4
WIDE = ModelShape(
    vocab_size=8192,
    hidden_size=1024,
    num_layers=3,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=3072,
    tied=True,
)


def main() -> None:
    """Times all rows, then prints a line for each way of sharing them out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="rows of a rank")
    parser.add_argument("--mean", type=int, default=1500, help="mean length of a completion")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--model", choices=("small", "wide"), default="small", help="width 384 or 1,024")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPE if options.model == "small" else WIDE
    model = make_model(shape, make_words(shape.vocab_size), max_length=options.longest + PROMPT).train()
    num_rows = options.ranks * options.rows
    lengths = np.random.default_rng(0).geometric(1 / options.mean, num_rows).clip(max=options.longest).tolist()
    prompts = [[5] * PROMPT for _ in range(num_rows // GROUP)]
    groups = [row // GROUP for row in range(num_rows)]
    seconds = np.array([row_seconds(model, [6] * length) for length in [lengths[0], *lengths]][1:])
    batch = build_batch(prompts, groups, [[6] * length for length in lengths])
    holders = [row // options.rows for row in range(num_rows)]
    print(f"{num_rows} rows of {min(lengths):,} to {max(lengths):,} tokens, {seconds.sum():.0f} s of the processor")
    ways = {"as sampled": holders}
    for name, cost in {"by tokens": 0.0, "by tokens and attention": attention_cost(model)}.items():
        costs = row_costs(batch, [FORWARD_AND_BACKWARD] * num_rows, cost)
        ways[name] = assign_to_ranks(costs, holders, options.ranks)
    for name, ranks in ways.items():
        loads = np.bincount(ranks, seconds)
        print(f"{name}: slowest rank {loads.max() / loads.mean():.2f} of the mean")


def row_seconds(model: torch.nn.Module, ids: list[int]) -> float:
    """Seconds of the processor for a row's passes."""
    started = time.process_time()
    model.zero_grad()
    scores = score_tokens(model, build_batch([[5] * PROMPT], [0], [ids]), ForwardOptions(layout="shared"))
    scores.logprobs.sum().backward()
    return time.process_time() - started


if __name__ == "__main__":
    main()
