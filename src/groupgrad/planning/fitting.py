"""Chooses settings with which a run fits into a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from groupgrad.planning.memory import Memory, RunSizes, predict
from groupgrad.planning.shapes import ModelShape

USABLE = 0.92
"""Share of a device that is planned for; the allocator's gaps take the rest."""

MOST_DEVICES = 1024
"""Devices up to which a plan looks for a number that would do."""

_VLLM_OVERHEAD = int(1.5 * 2**30)


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


def vllm_utilization(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> float | None:
    """Returns the share of a device for vLLM beside a trainer that does not sample; None if it does not fit.

    It holds a copy of the weights in two bytes each, and the keys and values of the rows that it samples.
    """
    sampling = predict(shape, replace(sizes, half=True, samples=True)).keys_values
    needed = 2 * shape.parameters + sampling + _VLLM_OVERHEAD
    left = device_bytes * USABLE - predict(shape, sizes).training
    return None if needed > left else round(needed / device_bytes + 0.005, 2)


def smallest_device(shape: ModelShape, sizes: RunSizes) -> int:
    """Returns the bytes of a device on which the least demanding of the ways fits."""
    least = min(predict(shape, replace(way, micro_batch=1, checkpointing=True)).peak for _, way in _ways(sizes))
    return int(least / USABLE)


def with_server(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> Choice | None:
    """Returns the first way that fits only if a vLLM server on other devices samples; None if there is none.

    A model in shards is sampled from by the native engine as a whole copy, which a server does without.
    """
    here = recommended(choices(shape, sizes, device_bytes))
    there = recommended(choices(shape, replace(sizes, samples=False), device_bytes))
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
    return [(name, way) for name, way in _all_ways(sizes) if name.startswith(sizes.way)]


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
        rows = sizes.micro_batch
        while rows >= 1:
            tried = replace(sizes, micro_batch=rows, checkpointing=checkpointing)
            memory = predict(shape, tried)
            if memory.peak <= device_bytes * USABLE:
                return Choice(name, tried, memory, fits=True)
            rows //= 2
    tried = replace(sizes, micro_batch=1, checkpointing=True)
    return Choice(name, tried, predict(shape, tried), fits=False)
