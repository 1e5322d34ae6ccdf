"""Times and checks single kernels on one card: attention of decode steps and of training, and the output head.

    python bench/gpu_kernels.py --answer FILE [--tiny]

Each check prints a line when it is done and is written to FILE at once. The status is the number of checks that failed.
`--tiny` runs everything with small sizes on the CPU, where nothing is compared with a bound that only a card can meet.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch comes
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_spans:True")

import torch
from gpu_bench import GIB, qwen3_shape, write_answer
from workloads import ModelShape

from groupgrad.engines.native.attention_layouts import DecodeBatch, DecodeLayout, StepShape
from groupgrad.engines.native.kv_cache import CacheRoom, KVCache, LayerShape
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.block_attention import BlockLayout
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.tiled_head import LogitTransform, OutputHead, tiled_scores


@dataclass(slots=True, frozen=True)
class Sizes:
    """Sizes of the checks."""

    attention: ModelShape
    """Heads of the attention checks."""
    rows: tuple[int, ...]
    """Rows of a decode step."""
    tokens: int
    """Longest completion in a decode step; tokens of a training row."""
    prompt: int
    head_tokens: int
    head_widths: tuple[int, ...]
    vocab: int


FULL = Sizes(
    attention=qwen3_shape(4096, 36, 32, 12288),
    rows=(16, 100, 128),
    tokens=1024,
    prompt=512,
    head_tokens=8192,
    head_widths=(1024, 4096),
    vocab=151_936,
)
TINY = Sizes(
    attention=ModelShape(64, 32, 2, 4, 2, 8, 64, tied=True),
    rows=(3, 20),
    tokens=12,
    prompt=8,
    head_tokens=32,
    head_widths=(16,),
    vocab=500,
)


class Report:
    """The results, in a file after each check."""

    def __init__(self, file: Path, device: torch.device) -> None:
        self.file, self.device, self.checks = file, device, list[dict[str, Any]]()

    @property
    def on_gpu(self) -> bool:
        """False in a rehearsal on a CPU, where no speed is measured."""
        return self.device.type == "cuda"

    @property
    def num_failed(self) -> int:
        """Checks that failed."""
        return sum(not check["ok"] for check in self.checks)

    def add(self, name: str, ok: bool, text: str, **figures: float | str) -> None:
        """Prints and stores one result."""
        self.checks.append({"name": name, "ok": ok, "text": text, "figures": figures})
        print(f"{'ok    ' if ok else 'FAILED'} {name}: {text}", flush=True)
        write_answer(self.file, {"checks": self.checks})

    def run(self, name: str, check: Callable[[], None]) -> None:
        """Runs a check; an exception is a failed one."""
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            self.add(name, False, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        if self.on_gpu:
            torch.cuda.empty_cache()


def seconds_of(report: Report, call: Callable[[], object], *, repeats: int = 20) -> float:
    """Median seconds of a call; on a card between two events of the device, after a call that warms up."""
    call()
    if not report.on_gpu:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    found = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return sorted(found)[len(found) // 2]


def decode_attention(report: Report, sizes: Sizes, num_rows: int) -> None:
    """Attention of a decode step of ragged rows against float64, and the bytes a second that it reads."""
    shape, device, dtype = sizes.attention, report.device, torch.bfloat16 if report.on_gpu else torch.float32
    lengths = [sizes.tokens // 2 + row * (sizes.tokens // 2) // num_rows for row in range(num_rows)]
    batch = DecodeBatch([row // 16 for row in range(num_rows)], [sizes.prompt] * num_rows, lengths)
    layers = 4 if report.on_gpu else 1  # so that no layer's keys are still in a cache when its turn comes again
    layer = LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim, dtype, device)
    cache = KVCache(dict.fromkeys(range(layers), layer), 2**40, is_recorded=report.on_gpu)
    num_groups = max(batch.groups) + 1
    longest = sizes.tokens + 1
    cache.reserve(
        CacheRoom(num_rows, longest, num_groups, sizes.prompt, max_suffix_length=longest), CacheRoom(0, 0, 0, 0)
    )
    for buffer in (cache.suffixes, cache.prompts):
        for pair in buffer.tensors.values():
            for tensor in pair:
                tensor.normal_()
    sizes_of_step = StepShape(num_rows, num_groups, 16, sizes.prompt, longest)
    layout = DecodeLayout(cache, batch, sizes_of_step if report.on_gpu else None)
    query = torch.randn(shape.num_heads, num_rows, shape.head_dim, device=device, dtype=dtype)
    key, value = torch.randn(2, shape.num_kv_heads, num_rows, shape.head_dim, device=device, dtype=dtype)
    calls = [AttentionCall(layer=number, scale=shape.head_dim**-0.5) for number in range(layers)]

    def step() -> torch.Tensor:
        outputs = [layout.attend(query, key, value, call) for call in calls]
        return outputs[0]

    found = step()
    expected = exact_attention(cache, batch, query, key, value, calls[0].scale)
    error = (found.double() - expected).abs().max().item() / expected.abs().max().item()
    run: Callable[[], object] = step
    if report.on_gpu:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    seconds = seconds_of(report, run)
    needed = layers * 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    needed *= sum(lengths) + num_rows + num_groups * sizes.prompt
    rate = needed / seconds / 1e9
    # Outputs are rounded to bfloat16, and so are the weights of a softmax before they multiply values.
    bound = 2 * torch.finfo(dtype).eps if report.on_gpu else 1e-5
    report.add(
        f"decode attention, {num_rows} rows",
        error <= bound,
        f"error {error:.1e} (bound {bound:.1e}), {1e6 * seconds / layers:.0f} us a layer, "
        f"{rate:,.0f} GB/s of keys and values",
        error=error,
        gigabytes_per_second=rate,
    )


def exact_attention(
    cache: KVCache, batch: DecodeBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """(n, Hq, D) float64 outputs of the first layer, a row at a time."""
    suffixes, prompts = cache.suffixes.tensors[0], cache.prompts.tensors[0]
    outputs = []
    for row, (group, prompt, length) in enumerate(zip(batch.groups, batch.prompt_lengths, batch.lengths)):
        keys, values = (
            torch.cat([shared[group, :, :prompt], mine[row, :, :length], new[:, row, None]], dim=1).double()
            for shared, mine, new in zip(prompts, suffixes, (key, value))
        )
        repeat = query.shape[0] // len(keys)
        scores = torch.einsum("hd,hsd->hs", query[:, row].double(), keys.repeat_interleave(repeat, 0)) * scale
        outputs.append(torch.einsum("hs,hsd->hd", scores.softmax(-1), values.repeat_interleave(repeat, 0)))
    return torch.stack(outputs)


def head(report: Report, sizes: Sizes, width: int) -> None:
    """The output head, forward and backward: milliseconds, memory and error, beside the kernels that can be carried."""
    device, dtype = report.device, torch.bfloat16 if report.on_gpu else torch.float32
    hidden = torch.randn(sizes.head_tokens, width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(sizes.vocab, width, device=device) / width**0.5).to(dtype).requires_grad_()
    tokens = torch.randint(sizes.vocab, (sizes.head_tokens,), device=device)
    some = slice(0, 256)
    with torch.no_grad():
        exact = hidden[some].double() @ weight.double().T
        exact = exact.gather(1, tokens[some, None]).squeeze(1) - exact.logsumexp(-1)
    for name, score in head_ways(hidden, weight, tokens).items():

        def both(score: Callable[[], torch.Tensor] = score) -> None:
            hidden.grad = weight.grad = None
            score().sum().backward()

        label = f"head of {width} by {sizes.vocab}, {name}"
        try:
            found = score()
            error = (found[some].double() - exact).abs().max().item() if found.dim() else math.nan
            if report.on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            seconds = seconds_of(report, both, repeats=3)
            peak = (torch.cuda.max_memory_allocated() - before) / GIB if report.on_gpu else 0.0
        except Exception as failure:  # of a peer, whose failure is a result
            report.add(label, name != "groupgrad", f"{type(failure).__name__}: {failure}"[:200])
            continue
        # bfloat16 products of `width` random numbers, then a sum of exponentials in float32.
        is_right = name != "groupgrad" or error <= (0.05 if report.on_gpu else 1e-4)
        text = f"{1e3 * seconds:.1f} ms, {peak:.2f} GiB, log-prob error {error:.1e}"
        report.add(label, is_right, text, milliseconds=1e3 * seconds, gib=peak, error=error)


Scoring = Callable[[], torch.Tensor]


def head_ways(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> dict[str, Scoring]:
    """Name -> log-probs (L,), or minus their sum where that is all that a library gives."""
    ways: dict[str, Scoring] = {
        "groupgrad": lambda: tiled_scores(hidden, OutputHead(weight), tokens, transform=LogitTransform()).logprobs
    }
    if importlib.util.find_spec("liger_kernel") and hidden.is_cuda:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        ways["Liger"] = lambda: loss(weight, hidden, tokens)
    if importlib.util.find_spec("cut_cross_entropy") and hidden.is_cuda:
        from cut_cross_entropy import linear_cross_entropy  # pyright: ignore

        ways["cut cross-entropy"] = lambda: -linear_cross_entropy(hidden, weight, tokens, reduction="none")
    return ways


def training_attention(report: Report, sizes: Sizes) -> None:
    """Attention of a training pass over a group that shares its prompt, and over rows that each have their own."""
    shape, device, dtype = sizes.attention, report.device, torch.bfloat16 if report.on_gpu else torch.float32
    prompt, length, rows = sizes.prompt, sizes.tokens // 2, 16
    shared = TokenSpan(0, prompt)
    spans = [shared]
    spans += [TokenSpan(prompt + row * length, length, position=prompt, row=row, shared=shared) for row in range(rows)]
    layout, call = BlockLayout(spans), AttentionCall(layer=0, scale=shape.head_dim**-0.5)
    num_tokens = prompt + rows * length

    def heads(count: int, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, count, shape.head_dim, device=device, dtype=dtype).transpose(-3, -2).requires_grad_()

    kv_heads = shape.num_kv_heads
    flat = heads(shape.num_heads, num_tokens), heads(kv_heads, num_tokens), heads(kv_heads, num_tokens)
    grad = torch.randn(num_tokens, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
    seconds = seconds_of(report, lambda: layout.attend(*flat, call).backward(grad), repeats=5)
    pairs = prompt**2 / 2 + rows * (length * prompt + length**2 / 2)
    rate = 3.5 * 4 * shape.num_heads * shape.head_dim * pairs / seconds / 1e12
    whole = prompt + length
    rect = heads(shape.num_heads, rows, whole), heads(kv_heads, rows, whole), heads(kv_heads, rows, whole)
    rect_grad = torch.randn_like(rect[0])

    def padded() -> None:
        attended = torch.nn.functional.scaled_dot_product_attention(*rect, is_causal=True, enable_gqa=True)
        attended.backward(rect_grad)

    beside = seconds_of(report, padded, repeats=5)
    report.add(
        "training attention",
        True,
        f"{1e3 * seconds:.2f} ms a layer for {num_tokens} shared tokens, {rate:.0f} TFLOP/s of the pairs needed; "
        f"each row with its prompt by scaled_dot_product_attention {1e3 * beside:.2f} ms",
        milliseconds=1e3 * seconds,
        tflops=rate,
        sdpa_milliseconds=1e3 * beside,
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs all checks; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    options = parser.parse_args(arguments)
    device = torch.device("cpu") if options.tiny else torch.device("cuda", torch.cuda.current_device())
    sizes, report = TINY if options.tiny else FULL, Report(options.answer, device)
    torch.manual_seed(0)
    for rows in sizes.rows:
        report.run(f"decode attention, {rows} rows", lambda rows=rows: decode_attention(report, sizes, rows))
    for width in sizes.head_widths:
        report.run(f"head of {width}", lambda width=width: head(report, sizes, width))
    report.run("training attention", lambda: training_attention(report, sizes))
    return min(report.num_failed, 100)


if __name__ == "__main__":
    sys.exit(main())
