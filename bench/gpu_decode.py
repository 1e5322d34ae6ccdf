"""Times recorded decode steps on a GPU, with Triton's kernels and without, against reading weights and keys once.

    python bench/gpu_decode.py [--rows 16 128] [--tokens 1024] [--prompt 512]

Qwen3-0.6B's shape with random weights in bfloat16, rows in groups of 16 whose own tokens are between half of `--tokens`
and all of them. A line for each number of rows and kind of step: norms, rotary embeddings, gates and attention by
Triton, attention alone, or neither. `--tiny` runs a very small model on the CPU, to
see that this works: steps are not recorded there, and Triton has no kernels.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext

import torch
from floor import reading_gigabytes
from gpu_bench import qwen3_shape
from materials import make_model, make_words
from workloads import ModelShape

from groupgrad.engines.native.attention_plans import DecodeBatch, ProbePlan
from groupgrad.engines.native.cuda_graphs import cuda_recorder
from groupgrad.engines.native.decode_kernels import SWITCH
from groupgrad.engines.native.direct_step import DirectModel, direct_model
from groupgrad.engines.native.kv_cache import KVCache, Need
from groupgrad.engines.native.logits import last_logits
from groupgrad.engines.native.runner import DecodeRunner

KINDS = {"Triton": "1", "attention by Triton": "1", "matrix products": "0"}
"""Kinds of steps, and the value of `SWITCH` for each."""

TINY = ModelShape(64, 32, 2, 4, 2, 8, 64, tied=True)
GROUP = 16


@torch.inference_mode()
def measure(shape: ModelShape, device: torch.device, rows: int, tokens: int, prompt: int, steps: int) -> None:
    """Prints a line for each kind of step."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    words = make_words(shape.vocab_size)
    model = make_model(shape, words, max_length=prompt + tokens + steps, dtype=dtype).to(device).eval()
    lengths = [tokens // 2 + row * (tokens // 2) // rows for row in range(rows)]
    batch = DecodeBatch([row // GROUP for row in range(rows)], [prompt] * rows, lengths)
    num_bytes = dtype.itemsize * sum(p.numel() for p in model.parameters())
    bandwidth = reading_gigabytes(0.5, 512 if on_gpu else 8, str(device)) * 1e9
    probe, token = ProbePlan(), torch.zeros(1, dtype=torch.int64, device=device)
    last_logits(model, token, token, probe, token)
    for kind in KINDS if on_gpu else ["matrix products"]:
        os.environ[SWITCH] = KINDS[kind]
        form = direct_model(model, probe.calls)
        direct = form if kind == "Triton" and isinstance(form, DirectModel) else None
        cache = KVCache(probe.layers, 2**40, is_recorded=on_gpu)
        num_groups = max(batch.groups) + 1
        need = Need(rows, tokens + steps, num_groups, prompt, max_suffix_length=2 * tokens + steps)
        cache.reserve(need, Need(0, 0, 0, 0))
        record = cuda_recorder({device}) if on_gpu else None
        runner = DecodeRunner(model, cache, device, record=record, direct=direct, probe=ProbePlan())
        step = runner.step_for(batch)
        ids = torch.full((rows,), 5, device=device)
        positions = torch.tensor(lengths, device=device) + prompt
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            step.logits(ids, positions)
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        read = num_bytes + cache.bytes_per_token * (sum(lengths) + num_groups * prompt)
        floor, found = read / bandwidth, sorted(seconds)[len(seconds) // 2]
        print(
            f"{rows} rows of {prompt} and {min(lengths)} to {max(lengths)} tokens, {kind}: "
            f"{1e3 * found:.2f} ms a step, floor {1e3 * floor:.2f} ms, "
            f"{floor / found:.0%} of it; {rows / found:,.0f} tokens a second ({bandwidth / 1e9:,.0f} GB/s)",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    """Measures each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, default=1024, help="longest completion so far")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="a very small model on the CPU")
    options = parser.parse_args(arguments)
    device = torch.device("cpu") if options.tiny else torch.device("cuda", torch.cuda.current_device())
    shape = TINY if options.tiny else qwen3_shape(1024, 28, 16, 3072)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for rows in options.rows:
            measure(shape, device, rows, options.tokens, options.prompt, options.steps)


if __name__ == "__main__":
    main()
