"""Times optimizer steps of SmolLM2-135M-Instruct with weights in float32 and in bfloat16, in turn.

    python bench/half_precision.py [--steps 3] [--workload real]

Prints the medians of a step, of its sampling and of its training, each by completion token, then the time of sampling
rows of equal lengths: the two models write different texts. `real` is a workload of `bench/run.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from plumbing import MODELS, describe_machine, set_environment, table

if __name__ == "__main__":  # before torch comes
    set_environment()

from materials import prepare
from run import start_worker
from workloads import LEARNING, WORKLOADS

TYPES = ("float32", "bfloat16")


def sampling_seconds(folder: Path, count: int) -> list[float]:
    """Seconds in which the engine samples so many rows of 96 tokens, by type: the shortest of three, in turn."""
    import torch
    from transformers import AutoModelForCausalLM

    from groupgrad.engines.base import Request, SamplingOptions
    from groupgrad.engines.native import NativeEngine

    requests = [Request([1, 2, 3, 4 + row // 8], row, 96) for row in range(count)]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name)) for name in TYPES]
    engines, seconds = [NativeEngine(model) for model in models], [[] for _ in TYPES]
    for _ in range(4):
        for engine, times in zip(engines, seconds):
            started = time.perf_counter()
            engine.sample(requests, SamplingOptions(max_new_tokens=96, eos_ids=(), pad_id=0))
            times.append(time.perf_counter() - started)
    return [min(times[1:]) for times in seconds]


def main() -> int:
    """Print the table; 1 if the model cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps that count, behind one for warm-up (default 3)")
    parser.add_argument("--workload", choices=("real", LEARNING.name), default="real")
    options = parser.parse_args()
    workload = {**WORKLOADS, LEARNING.name: LEARNING}[options.workload]
    try:
        folder = prepare(workload, MODELS)
    except FileNotFoundError as error:
        print(error)
        return 1
    print(f"{workload.describe()}; {describe_machine()}", flush=True)
    workers = {name: start_worker(name, Path(sys.executable), workload, folder, dtype=name) for name in TYPES}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in TYPES}
    try:
        for worker in workers.values():
            worker.read("ready")
        for number in range(options.steps + 1):
            for name in TYPES[:: 1 if number % 2 else -1]:
                steps[name].append(workers[name].ask("step"))
    finally:
        for worker in workers.values():
            worker.stop()

    def median(name: str, part: str | None) -> float:
        """Milliseconds a completion token, whose number differs from step to step."""
        return 1000 * statistics.median(
            (one["phases"][part] if part else one["seconds"]) / sum(one["lengths"]) for one in steps[name][1:]
        )

    rows = []
    for text, part in {"a step": None, "sampling": "sampling", "training": "training"}.items():
        ours, half = (median(name, part) for name in TYPES)
        rows.append([f"{text}, ms a token", f"{ours:.2f}", f"{half:.2f}", f"{half / ours:.2f}"])
    for count in (32, 8, 4):
        ours, half = sampling_seconds(folder, count)
        rows.append([f"sampling {count} rows of 96 tokens, s", f"{ours:.2f}", f"{half:.2f}", f"{half / ours:.2f}"])
    print(table(["", *TYPES, "ratio"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
