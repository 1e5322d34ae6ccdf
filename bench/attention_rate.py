"""Measures the compiled attention of one long row against the rate of large matrix products, on one thread.

    python bench/attention_rate.py [--tokens 8192] [--rounds 4]

A row behind a prompt of 64 tokens, heads as in `long_rows.py`. The forward pass counts two products of queries and keys
of half a square, the backward pass five: scores are computed again. The last figure counts six, as floors do, which
could keep the scores. Processor seconds; each figure is the fastest round's.
"""

from __future__ import annotations

import argparse
import os
import time

if __name__ == "__main__":  # before torch comes; whoever only imports this keeps his environment
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from long_rows import PROMPT, SHAPE

from groupgrad.scoring.attention_plan import AttentionCall
from groupgrad.scoring.block_attention import BlockPlan
from groupgrad.scoring.blocks import Segment

SQUARE = 2048
"""Rows and columns of the large matrices."""


def main() -> None:
    """Prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the row, its prompt included")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, width = options.tokens, SHAPE.head_dim
    prompt = Segment(0, PROMPT)
    plan = BlockPlan([prompt, Segment(PROMPT, tokens - PROMPT, shared=prompt)])
    call = AttentionCall(layer=0, scale=width**-0.5)
    sizes = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
    query, key, value = (torch.randn(heads, tokens, width, requires_grad=True) for heads in sizes)
    gradient = torch.randn(tokens, SHAPE.num_heads, width)
    left, right = torch.randn(2, SQUARE, SQUARE)
    product = SHAPE.num_heads * width * tokens**2  # operations: a multiplication and an addition for half of the pairs
    best = {"squares": 0.0, "forward": 0.0, "backward": 0.0}

    def note(name: str, operations: float, started: float) -> None:
        best[name] = max(best[name], operations / (time.process_time() - started))

    for _ in range(options.rounds):
        for _ in range(4):
            started = time.process_time()
            torch.mm(left, right)
            note("squares", 2 * SQUARE**3, started)
        started = time.process_time()
        output = plan.attend(query, key, value, call)
        note("forward", 2 * product, started)
        started = time.process_time()
        output.backward(gradient)
        note("backward", 5 * product, started)
    squares, forward, backward = (rate / 1e9 for rate in best.values())
    counted = 6 / (2 / forward + 5 / backward)
    print(
        f"{tokens:,} tokens, 10^9 operations a second: squares {squares:.0f}, forward {forward:.0f} "
        f"({forward / squares:.0%}), backward {backward:.0f} ({backward / squares:.0%}), both as floors count "
        f"{counted:.0f} ({counted / squares:.0%}); load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
