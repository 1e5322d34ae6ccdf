"""Times sampling with and without the compiled decode step, on one thread and on models of the workloads' shapes.

`python bench/decode_steps.py [--only uniform,ragged] [--repetitions 2]` prints CPU seconds beside wall-clock seconds;
other work on the machine hardly changes them.
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
    """Requests of the workload. Geometric lengths are drawn here, since a random model does not end its rows."""
    generator = random.Random(1)
    tokens = [
        [generator.randrange(workload.model.vocab_size) for _ in range(workload.prompt_tokens or 64)]
        for _ in range(workload.num_groups)
    ]
    mean, limit = workload.mean_length, workload.limit
    lengths = [
        limit if mean is None else min(limit, 1 + int(generator.expovariate(1 / mean)))
        for _ in range(workload.batch_rows)
    ]
    return [Request(tokens[i // workload.num_generations], i, length) for i, length in enumerate(lengths)]


def main() -> None:
    """Prints a line for each workload, with and without the compiled step."""
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
        timings: dict[str, list[tuple[float, float]]] = {"compiled": [], "in Python": []}
        for _ in range(options.repetitions):
            for name_of_step in timings:
                os.environ[SWITCH] = "1" if name_of_step == "compiled" else "0"
                started, cpu_started = time.perf_counter(), time.process_time()
                NativeEngine(model).sample(requests, SamplingOptions(max_new_tokens=workload.limit))
                timings[name_of_step].append((time.perf_counter() - started, time.process_time() - cpu_started))
        for name_of_step, seconds in timings.items():
            wall_s, cpu_s = (statistics.median(values) for values in zip(*seconds))
            print(f"{name}, {name_of_step}: {wall_s:.2f} s, CPU {cpu_s:.2f} s, {num_tokens / wall_s:.0f} tokens/s")


if __name__ == "__main__":
    main()
