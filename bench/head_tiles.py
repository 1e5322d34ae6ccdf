"""Seconds and memory of the output head alone, forward and backward, in several ways.

    OMP_NUM_THREADS=2 python bench/head_tiles.py [--tokens 2048] [--hidden 512] [--vocab 151936] [--ways tiled plain]

Each way runs in a process of its own. Besides wall-clock and processor seconds it prints how many products of size
tokens x vocabulary x hidden would fit into the processor time at the rate measured beforehand, and the most memory
beyond what was in use before, the gradient of the weight included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from groupgrad.scoring.tiled_head import (
    LogitTransform,
    OutputHead,
    PrecomputedGradient,
    Tiles,
    scores_with_gradient,
    tiled_scores,
)

WAYS = (
    "tiled",
    "tiled with entropy gradient",
    "tiled, precomputed gradient",
    "tiled, frozen head",
    "tiles of 4096 x 32768",
)
WAYS += ("checkpointed chunks of 512 tokens", "plain")
PAGE = 4096


def plain(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole logits."""
    logits = linear(hidden, weight)
    normaliser = torch.logsumexp(logits, -1)
    logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - normaliser
    with torch.no_grad():
        entropy = normaliser - (torch.exp(logits - normaliser[:, None]) * logits).sum(-1)
    return logprobs, entropy


def chunked(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of 512 tokens at a time, computed again for the gradient by torch's own checkpointing."""
    parts = zip(hidden.split(512), tokens.split(512))
    found = [checkpoint(plain, h, weight, t, use_reentrant=False) for h, t in parts]
    return torch.cat([part[0] for part in found]), torch.cat([part[1] for part in found])  # pyright: ignore


def make_way(
    name: str, hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, gradient: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A function that gives the log-probs."""
    transform, head = LogitTransform(), OutputHead(weight)
    if name == "plain":
        return lambda: plain(hidden, weight, tokens)[0]
    if name.startswith("checkpointed"):
        return lambda: chunked(hidden, weight, tokens)[0]
    if name == "tiled, precomputed gradient":
        with torch.no_grad():  # in other tiles, as a sampler's would differ in rounding
            logprobs = tiled_scores(hidden, head, tokens, transform=transform, tiles=Tiles(300, 4000)).logprobs
        precomputed = PrecomputedGradient(logprobs, gradient)
        return lambda: scores_with_gradient(hidden, head, tokens, precomputed, transform=transform).logprobs
    tiles = Tiles(4096, 32768) if name.startswith("tiles of") else None
    entropy = name.endswith("entropy gradient")

    def score() -> torch.Tensor:
        scores = tiled_scores(hidden, head, tokens, transform=transform, tiles=tiles, entropy_gradient=entropy)
        return scores.logprobs + scores.entropy if entropy else scores.logprobs

    return score


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def measure(name: str, sizes: tuple[int, int, int]) -> None:
    """Run one way twice, print the second time."""
    num_tokens, width, vocab = sizes
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width)).requires_grad_(name != "tiled, frozen head")
    tokens, gradient = torch.randint(0, vocab, (num_tokens,)), torch.randn(num_tokens)
    way = make_way(name, hidden, weight, tokens, gradient)
    rate = matrix_product_rate()
    for _ in range(2):
        hidden.grad = weight.grad = None
        peak, before, done = [0], resident(), threading.Event()
        watch = threading.Thread(target=_watch, args=(peak, done))
        watch.start()
        wall, processor = time.perf_counter(), time.process_time()
        (way() * gradient).sum().backward()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        done.set()
        watch.join()
    products = processor * rate / (2e-9 * num_tokens * width * vocab)
    print(
        f"{name:36s} {wall:7.2f} s  processor {processor:7.2f} s = {products:5.2f} products  "
        f"{(peak[0] - before) / 2**20:6.0f} MiB",
        flush=True,
    )


def matrix_product_rate() -> float:
    """GFLOP a second and core, of one large product."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 2048)
    best = 0.0
    for _ in range(5):
        start = time.process_time()
        left @ right
        best = max(best, 2e-9 * 1024 * 1024 * 2048 / (time.process_time() - start))
    return best


def _watch(peak: list[int], done: threading.Event) -> None:
    while not done.wait(0.005):
        peak[0] = max(peak[0], resident())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    options = parser.parse_args()
    for name in options.ways:
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(name, (options.tokens, options.hidden, options.vocab))
        )
        process.start()
        process.join()


if __name__ == "__main__":
    main()
