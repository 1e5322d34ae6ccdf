"""Seconds of sampling with the compiled decode step and without it, in turn, on one thread and on models of the
workloads' shapes: `python bench/decode_steps.py [--only uniform,ragged] [--repetitions 2]`.

Seconds of the processor are printed beside those of the clock: other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from workloads import WORKLOADS, ModelShape, Workload

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.kernels.compile import SWITCH, status


def make_model(shape: ModelShape) -> Qwen3ForCausalLM:
    """A random model of the shape."""
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 4096,
    }
    for name in ("vocab_size", "hidden_size", "head_dim", "intermediate_size"):
        sizes[name] = getattr(shape, name)
    return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()  # pyright: ignore[reportArgumentType]


def make_requests(workload: Workload) -> list[Request]:
    """The workload's rows; geometric lengths are drawn here, since a random model does not end its rows."""
    draw = random.Random(1)
    tokens = [
        [draw.randrange(workload.model.vocab_size) for _ in range(workload.prompt_tokens or 64)]
        for _ in range(workload.num_groups)
    ]
    mean, limit = workload.mean_length, workload.limit
    lengths = [
        limit if mean is None else min(limit, 1 + int(draw.expovariate(1 / mean))) for _ in range(workload.batch_rows)
    ]
    return [Request(tokens[i // workload.num_generations], i, length) for i, length in enumerate(lengths)]


def main() -> None:
    """Print a line for each workload and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="uniform,ragged,reasoning,large_vocab", help="workloads, comma-separated")
    parser.add_argument("--repetitions", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"compiled kernels: {status()}")
    for name in options.only.split(","):
        workload = WORKLOADS[name]
        model, requests = make_model(workload.model), make_requests(workload)
        num_tokens = sum(request.max_new_tokens for request in requests)
        found: dict[str, list[tuple[float, float]]] = {"compiled": [], "in Python": []}
        for _ in range(options.repetitions):
            for way in found:
                os.environ[SWITCH] = "1" if way == "compiled" else "0"
                clock, processor = time.perf_counter(), time.process_time()
                NativeEngine(model).sample(requests, SamplingOptions(max_new_tokens=workload.limit))
                found[way].append((time.perf_counter() - clock, time.process_time() - processor))
        for way, seconds in found.items():
            clock, processor = (statistics.median(values) for values in zip(*seconds))
            print(
                f"{name}, {way}: {clock:.2f} s, of the processor {processor:.2f} s, {num_tokens / clock:.0f} tokens/s"
            )


if __name__ == "__main__":
    main()
