"""Measures the machine's matrix-product rate and memory bandwidth, and derives the minimum seconds of a step.

    python bench/floor.py

A floor counts what exact GRPO needs when prompts are computed once per group and nothing is padded: multiplications at
the measured rate, or bytes at the measured bandwidth, whichever takes longer. Norms, softmax, sampling and all Python
count as nothing. The rates are those of torch's products; more than 100 % means that groupgrad's own were faster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from workloads import BASE, GroupWork, ModelShape, Workload, groups_of

BYTES = 4
"""Bytes of a float32, the type that memory is measured with."""


@dataclass(slots=True, frozen=True)
class Machine:
    """Measured rates of this machine, with the threads of training."""

    gflops: float
    """Rate of large matrix products in the models' type, 10^9 operations a second."""
    decode_gflops: float | None
    """Rate of the matrix products of a decode step (32 rows times all weights of the base model in turn); None for an
    accelerator."""
    gigabytes_per_second: float
    """Rate of reading memory that no cache holds, 10^9 bytes a second."""
    bytes_per_number: int = BYTES
    """Bytes of a weight, a key or a value."""

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.gflops * 1e9

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.gigabytes_per_second * 1e9

    def describe(self) -> str:
        """The three numbers in a sentence."""
        return (
            f"Matrix products: {self.gflops:.0f} GFLOP/s (2048 x 2048), {self.decode_gflops:.0f} GFLOP/s (32 rows "
            f"times the base model's weights, as in decoding). Memory: {self.gigabytes_per_second:.1f} GB/s read."
        )


def fastest(function: Callable[[], object], seconds: float, device: str = "cpu") -> float:
    """Seconds of the fastest of as many calls as fit into `seconds` (at least two)."""
    best, end, calls = float("inf"), time.perf_counter() + seconds, 0
    while calls < 2 or time.perf_counter() < end:
        started = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
        calls += 1
    return best


def product_gflops(seconds: float, square: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """10^9 operations a second of the product of two random matrices."""
    a, b, out = (torch.randn(square, square, device=device, dtype=dtype) for _ in range(3))
    return 2 * square**3 / fastest(lambda: torch.mm(a, b, out=out), seconds, device) / 1e9


def reading_gigabytes(seconds: float, megabytes: int, device: str = "cpu") -> float:
    """10^9 bytes a second of new memory of this size, read by a sum or a product with a vector, the faster of both."""
    memory = torch.ones(megabytes * 2**20 // BYTES // 4096, 4096, device=device)
    vector = torch.ones(4096, device=device)
    ways = (memory.sum, lambda: torch.mv(memory, vector))
    return memory.numel() * BYTES / min(fastest(way, seconds / 2, device) for way in ways) / 1e9


@torch.inference_mode()
def measure_accelerator(
    device: str, dtype: torch.dtype, seconds: float = 1.0, *, square: int, megabytes: int
) -> Machine:
    """Measure one device for about twice `seconds`, with matrices of `dtype`."""
    gflops = product_gflops(seconds, square, device, dtype)
    return Machine(gflops, None, reading_gigabytes(seconds, megabytes, device), dtype.itemsize)


@torch.inference_mode()
def measure_machine(seconds: float = 1.5, *, square: int = 2048, megabytes: int = 512) -> Machine:
    """Measure the processor for about three times `seconds`."""
    gflops = product_gflops(seconds, square)
    weights = decode_weights(BASE)
    inputs = {weight.shape[1]: torch.randn(32, weight.shape[1]) for weight in weights}

    def decode() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    decoding = fastest(decode, seconds)
    return Machine(
        gflops=gflops,
        decode_gflops=2 * 32 * sum(weight.numel() for weight in weights) / decoding / 1e9,
        gigabytes_per_second=reading_gigabytes(seconds, megabytes),
    )


def decode_weights(shape: ModelShape) -> list[torch.Tensor]:
    """Random matrices (out, in) of the sizes that one token is multiplied with in a decode step."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    layer = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
    return [torch.randn(size) for size in layer * shape.num_layers + [(shape.vocab_size, hidden)]]


def attention_operations(shape: ModelShape, pairs: float) -> float:
    """Operations of scores and weighted values in all attention layers, for this many (query, key) pairs."""
    return 4.0 * shape.num_attention_layers * shape.num_heads * shape.head_dim * pairs


def sampling_floor(shape: ModelShape, machine: Machine, groups: Sequence[GroupWork]) -> float:
    """Seconds to sample these completions: prompts once, then each step at the cost of the rows still running."""
    weights = shape.layer_parameters + shape.head_parameters
    key_values = 2 * shape.num_attention_layers * shape.num_kv_heads * shape.head_dim
    recurrent = shape.recurrent
    states, of_states = (0, 0) if recurrent is None else (recurrent.state_numbers, recurrent.state_operations)

    def seconds(operations: float, numbers: float) -> float:
        return max(operations / machine.rate, numbers * machine.bytes_per_number / machine.bandwidth)

    prompts = [group.prompt_tokens for group in groups]
    operations = 2.0 * shape.layer_parameters * sum(prompts) + 2.0 * shape.head_parameters * len(groups)
    operations += attention_operations(shape, sum(p * p / 2 for p in prompts)) + of_states * sum(prompts)
    total = seconds(operations, weights + key_values * sum(prompts))
    # The prompt gives the first token; token t+1 of a row comes from feeding its token t.
    for t in range(1, max(max(group.lengths) for group in groups)):
        running = [sum(length > t for length in group.lengths) for group in groups]
        rows = sum(running)
        pairs = sum(n * (p + t) for n, p in zip(running, prompts))
        kept = sum(p for n, p in zip(running, prompts) if n) + rows * t
        operations = (2.0 * weights + of_states) * rows + attention_operations(shape, pairs)
        # A state is read and written.
        total += seconds(operations, weights + key_values * kept + 2 * states * rows)
    return total


def training_floor(shape: ModelShape, machine: Machine, groups: Sequence[GroupWork]) -> float:
    """Seconds of forward and backward (twice the forward) over the groups whose rewards differ."""
    prompts = sum(group.prompt_tokens for group in groups if group.live)
    completions = sum(sum(group.lengths) for group in groups if group.live)
    pairs = sum(
        group.prompt_tokens**2 / 2 + sum(n * group.prompt_tokens + n * n / 2 for n in group.lengths)
        for group in groups
        if group.live
    )
    operations = 2.0 * shape.layer_parameters * (prompts + completions) + 2.0 * shape.head_parameters * completions
    if shape.recurrent is not None:
        operations += shape.recurrent.state_operations * (prompts + completions)
    return 3.0 * (operations + attention_operations(shape, pairs)) / machine.rate


def floors_of(workload: Workload, machine: Machine, step: dict[str, Any]) -> dict[str, float]:
    """The least seconds of a measured step's parts on this machine."""
    groups = groups_of(step, workload.num_generations)
    return {
        "sampling": sampling_floor(workload.model, machine, groups),
        "training": training_floor(workload.model, machine, groups),
    }


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    print(measure_machine().describe())
