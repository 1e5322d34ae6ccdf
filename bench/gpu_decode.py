"""Times recorded decode steps on a GPU as the trainer's engine makes them, against reading weights and keys once.

    python bench/gpu_decode.py --answer FILE [--models 0.6b 8b] [--rows 16 128] [--tokens 1024] [--prompt 512]

Random weights in bfloat16 under accelerate's wrapper with autocast, as in training; rows in groups of 16 whose own
tokens are between half of `--tokens` and all of them. A line for each model and number of rows, and the launches and
the eight longest kernels of a step. `--tiny` runs a very small model on the CPU, where steps are not recorded.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch comes
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from accelerate import Accelerator
from floor import reading_gigabytes
from gpu_bench import CARDS, write_answer
from materials import make_model, make_words

from groupgrad.engines.base import SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.native.attention_layouts import DecodeBatch
from groupgrad.engines.native.kv_cache import CacheRoom

GROUP = 16
SHOWN = 8
"""Longest kernels that are listed."""


def measure(name: str, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each number of rows; each is printed when it is measured."""
    on_gpu, shape = device.type == "cuda", CARDS[name].workload.model
    dtype = torch.bfloat16 if on_gpu else torch.float32
    words, longest = make_words(shape.vocab_size), options.tokens + options.steps + 8
    with device:
        model = make_model(shape, words, max_length=options.prompt + longest, dtype=dtype).eval()
    num_bytes = dtype.itemsize * sum(p.numel() for p in model.parameters())
    accelerator = Accelerator(cpu=not on_gpu, mixed_precision="bf16" if on_gpu else "no")
    prepared: Any = accelerator.prepare_model(model)
    bandwidth = reading_gigabytes(0.5, 2048 if on_gpu else 8, str(device)) * 1e9
    engine = NativeEngine(prepared, tokenizer=words, precision=accelerator.autocast)
    found = []
    for rows in options.rows:
        with engine.session(SamplingOptions(max_new_tokens=1)) as session, torch.inference_mode():
            found.append({"model": name, "rows": rows, **decode(session, rows, options, num_bytes, bandwidth)})
        print(described(found[-1]), flush=True)
    return found


def decode(session: Any, rows: int, options: argparse.Namespace, num_bytes: int, bandwidth: float) -> dict[str, Any]:
    """Times decode steps of `rows` rows in a session's own cache and runner."""
    runner, device = session._runner, session._device
    half = options.tokens // 2
    lengths = [half + row * half // rows for row in range(rows)]
    batch = DecodeBatch([row // GROUP for row in range(rows)], [options.prompt] * rows, lengths)
    num_groups, cache = max(batch.groups) + 1, runner.cache
    size = options.tokens + options.steps + 4
    cache.reserve(CacheRoom(rows, size, num_groups, options.prompt, max_suffix_length=size), CacheRoom(0, 0, 0, 0))
    step = runner.step_for(batch)
    ids = torch.full((rows,), 5, device=device)
    positions = torch.tensor(lengths, device=device) + options.prompt

    def run() -> None:
        step.logits(ids, positions)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(options.steps):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    median = sorted(seconds)[len(seconds) // 2]
    read = num_bytes + cache.bytes_per_token * (sum(lengths) + num_groups * options.prompt)
    return {
        "path": step.path,
        "direct": type(runner.direct).__name__,
        "milliseconds": 1e3 * median,
        "tokens_per_second": rows / median,
        "of_floor": read / bandwidth / median,
        "gigabytes_per_second": bandwidth / 1e9,
        **(kernels_of(run) if device.type == "cuda" else {"launches": 0, "longest": []}),
    }


def kernels_of(run: Any) -> dict[str, Any]:
    """Launches of a step, and its longest kernels as (name, launches, microseconds)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    longest = [(event.key[:60], event.count, event.self_device_time_total) for event in events[:SHOWN]]
    return {"launches": sum(event.count for event in events), "longest": longest}


def described(found: dict[str, Any]) -> str:
    """The lines of one record."""
    layers = CARDS[found["model"]].workload.model.num_layers
    lines = [
        f"{found['model']}, {found['rows']} rows, {found['path']}, {found['direct']}: "
        f"{found['milliseconds']:.2f} ms a step, {found['tokens_per_second']:,.0f} tokens/s, "
        f"{found['of_floor']:.0%} of the floor ({found['gigabytes_per_second']:,.0f} GB/s), "
        f"{found['launches']} launches "
        f"({found['launches'] / layers:.1f} a layer)"
    ]
    return "\n".join([*lines, *(f"    {us:8.1f} us in {count:3d}  {name}" for name, count, us in found["longest"])])


def main(arguments: list[str] | None = None) -> None:
    """Measures each model and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["0.6b", "8b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, default=1024, help="longest completion so far")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="a very small model on the CPU")
    options = parser.parse_args(arguments)
    device = torch.device("cpu") if options.tiny else torch.device("cuda", torch.cuda.current_device())
    found: list[dict[str, Any]] = []
    for name in ["tiny"] if options.tiny else options.models:
        found += measure(name, device, options)
        write_answer(options.answer, {"stage": "decode", "steps": found})
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
