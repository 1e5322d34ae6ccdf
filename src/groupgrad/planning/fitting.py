"""Chooses settings with which a run fits into a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from groupgrad.engines.vllm import memory_check
from groupgrad.engines.vllm.colocate_start import MAX_NUM_SEQS, ColocateOptions
from groupgrad.planning.memory import Adapter, Colocate, Memory, RunSizes, predict
from groupgrad.planning.shapes import ModelShape

USABLE = 0.92
"""Share of a device that is planned for; the allocator's gaps take the rest."""

MOST_DEVICES = 1024
"""Devices up to which a plan looks for a number that would do."""


@dataclass(slots=True, frozen=True)
class Choice:
    """One way to run, and its memory on a device."""

    name: str
    sizes: RunSizes
    memory: Memory
    fits: bool


def choices(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> list[Choice]:
    """Returns the ways to run: full weights, LoRA and 4 bits, and with several devices the ways to shard.

    Each has the largest micro-batch that fits, without checkpointing where one row fits so. Rows that devices train
    together (`context_parallel_size`) leave the model whole on each, so none of the ways to shard is among them then.
    """
    return [_largest(shape, name, way, device_bytes) for name, way in _ways(sizes)]


def recommended(found: list[Choice]) -> Choice | None:
    """Returns the first way that fits; the ways are in the order of how little they change."""
    return next((choice for choice in found if choice.fits), None)


@dataclass(slots=True, frozen=True)
class VLLMShare:
    """Settings of a vLLM beside training that `memory_check.memory_problem` accepts."""

    utilization: float
    """`vllm_gpu_memory_utilization`: share of the device."""
    max_model_length: int | None
    """`vllm_max_model_length`, in tokens; None where a row of the model's whole context fits."""


def vllm_share(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> VLLMShare | None:
    """Returns the share of a device for vLLM beside a trainer that does not sample; None if it does not fit.

    The share holds what the trainer demands (weights, a workspace and one row of the context), and the keys and values
    of the rows that vLLM samples where there is room for them. Where no row of the model's whole context fits, rows of
    the run's length are tried.
    """
    colocate, sampling = sizes.colocate or Colocate(), replace(sizes, samples=True, rows=min(sizes.rows, MAX_NUM_SEQS))
    all_rows = predict(shape, sampling).keys_values
    training = training_bytes(predict(shape, replace(sizes, samples=False)))
    memory = memory_check.Memory(total=device_bytes, available=int(device_bytes * USABLE))
    room = memory.available - (training.while_sampling if colocate.sleeps else training.total)
    lengths = (
        (None, sizes.prompt + sizes.completion) if colocate.max_model_length is None else (colocate.max_model_length,)
    )
    for length in lengths:
        options = _vllm_options(sizes, length)
        served = memory_check.ServedBytes.of_config(*_served(shape, sizes), options)
        wanted = served.total + max(0, all_rows - served.one_row)
        share = math.ceil(1000 * wanted / device_bytes) / 1000
        share = min(share, math.floor(1000 * room / device_bytes) / 1000)
        for tried in (share,) if colocate.utilization is None else (colocate.utilization, share):
            of_share = replace(options, memory_utilization=tried)
            if memory_check.memory_problem(served, training, memory, of_share) is None:
                return VLLMShare(tried, length)
    return None


def training_bytes(memory: Memory) -> memory_check.TrainingBytes:
    """Returns the predicted memory of training in the parts that the trainer compares with vLLM's."""
    return memory_check.TrainingBytes(
        weights=memory.context + memory.weights + memory.reference,
        gradients=memory.gradients,
        optimizer=memory.optimizer,
        activations=max(memory.activations + memory.scratch, memory.update),
    )


def smallest_device(shape: ModelShape, sizes: RunSizes) -> int:
    """Returns the bytes of a device on which the least demanding of the ways fits."""
    least = min(_needed(shape, _with_micro_batch(way, 1, checkpointing=True)) for _, way in _ways(sizes))
    # The share of a colocated vLLM is a multiple of 1/1000.
    return int(least / (USABLE if sizes.colocate is None else USABLE - 0.001))


def with_server(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> Choice | None:
    """Returns the first way that fits only if a vLLM server on other devices samples; None if there is none.

    A model in shards is sampled from by the native engine as a whole copy, which a server does without.
    """
    here = recommended(choices(shape, sizes, device_bytes))
    there = recommended(choices(shape, replace(sizes, samples=False, colocate=None), device_bytes))
    return None if there is None or (here is not None and here.name == there.name) else there


def with_more_devices(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> Choice | None:
    """Returns the first way that fits on 2, 4, 8, ... times as many devices, `MOST_DEVICES` at most; None without."""
    devices = 2 * sizes.devices
    while devices <= MOST_DEVICES:
        if (found := recommended(choices(shape, replace(sizes, devices=devices), device_bytes))) is not None:
            return found
        devices *= 2
    return None


def _ways(sizes: RunSizes) -> list[tuple[str, RunSizes]]:
    only = sizes.only_sharding
    if only is not None:
        adapters: tuple[tuple[str, Adapter], ...] = (("full", "full"), ("LoRA", "lora"), ("4-bit", "4bit"))
        ending = "" if only == "ddp" else f", {only}"
        # bitsandbytes' packed weights are not divided.
        whole = only not in ("zero3", "fsdp2")
        found = [(name + ending, kind) for name, kind in adapters if whole or kind != "4bit"]
        ways = [(name, replace(sizes, adapter=kind, sharding=only)) for name, kind in found]
    else:
        ways = list(_all_ways(sizes))
    return [(name, way) for name, way in ways if name.startswith(sizes.way)]


def _all_ways(sizes: RunSizes) -> Iterator[tuple[str, RunSizes]]:
    shards = sizes.devices > 1 and sizes.context_parallel_size == 1
    yield "full", replace(sizes, adapter="full", sharding="ddp")
    if shards:
        for sharding in ("zero1", "zero2", "zero3", "fsdp2"):
            yield f"full, {sharding}", replace(sizes, adapter="full", sharding=sharding)
    yield "LoRA", replace(sizes, adapter="lora", sharding="ddp")
    if shards:
        for sharding in ("zero3", "fsdp2"):
            yield f"LoRA, {sharding}", replace(sizes, adapter="lora", sharding=sharding)
    yield "4-bit", replace(sizes, adapter="4bit", sharding="ddp")


def _largest(shape: ModelShape, name: str, sizes: RunSizes, device_bytes: int) -> Choice:
    """A way with the largest micro-batch that fits, or of one row with checkpointing if none does."""
    for checkpointing in (sizes.checkpointing, True):
        for rows in _micro_batches(sizes):
            tried = _with_micro_batch(sizes, rows, checkpointing=checkpointing)
            memory = predict(shape, tried)
            if memory.peak <= device_bytes * USABLE and (
                tried.colocate is None or vllm_share(shape, tried, device_bytes) is not None
            ):
                return Choice(name, tried, memory, fits=True)
    tried = _with_micro_batch(sizes, 1, checkpointing=True)
    return Choice(name, tried, predict(shape, tried), fits=False)


def _needed(shape: ModelShape, sizes: RunSizes) -> int:
    """Bytes of the peak, and of a colocated vLLM with rows of the run's length beside training."""
    memory = predict(shape, sizes)
    if sizes.colocate is None:
        return memory.peak
    training = training_bytes(memory)
    length = sizes.colocate.max_model_length or sizes.prompt + sizes.completion
    beside = training.while_sampling if sizes.colocate.sleeps else training.total
    served = memory_check.ServedBytes.of_config(*_served(shape, sizes), _vllm_options(sizes, length))
    return max(memory.peak, training.total, beside + served.total)


def _vllm_options(sizes: RunSizes, length: int | None) -> ColocateOptions:
    colocate = sizes.colocate or Colocate()
    return ColocateOptions(
        max_num_seqs=min(sizes.rows, MAX_NUM_SEQS),
        max_model_len=length,
        dtype="bfloat16" if sizes.half or sizes.weight_bytes == 2 else "float32",
        tensor_parallel_size=colocate.tensor_parallel_size,
        sleep_mode=colocate.sleeps,
    )


def _served(shape: ModelShape, sizes: RunSizes) -> tuple[int, Any]:
    """Bytes of the weights that vLLM serves, and the configuration of the text decoder."""
    return shape.parameters * (2 if sizes.half else sizes.weight_bytes), shape.text


def _micro_batches(sizes: RunSizes) -> list[int]:
    """Micro-batches up to the largest that is tried, in falling order; steps and generation batches are multiples."""
    step = sizes.step_rows or sizes.micro_batch
    both = math.gcd(step, sizes.generation_rows or step)
    return [rows for rows in range(min(max(sizes.micro_batch, sizes.most_rows), both), 0, -1) if both % rows == 0]


def _with_micro_batch(sizes: RunSizes, rows: int, *, checkpointing: bool) -> RunSizes:
    """The same step in micro-batches of `rows`."""
    accumulates = rows < sizes.step_rows if sizes.step_rows else sizes.accumulates
    return replace(sizes, micro_batch=rows, checkpointing=checkpointing, accumulates=accumulates)
