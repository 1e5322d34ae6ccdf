"""Chooses settings with which a run fits into a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from groupgrad.apps.plan.memory import Adapter, Colocate, Memory, RunSizes, Sharding, predict
from groupgrad.apps.plan.shapes import ModelShape, cache_values
from groupgrad.integrations.vllm.colocate_start import MAX_NUM_SEQS

USABLE = 0.92
"""Share of a device that is planned for; the allocator's gaps take the rest."""

WORKSPACE = 0.1
"""vLLM's workspace, as a share of its weights."""

FSDP_OPTIMIZERS = ("adamw", "sgd")
"""Optimizers that update a shard as they would the whole."""

_WAYS: tuple[tuple[str, Adapter, tuple[Sharding, ...]], ...] = (
    ("full", "full", ("zero1", "zero2", "zero3", "fsdp2")),
    ("LoRA", "lora", ("zero3", "fsdp2")),
    ("4-bit", "4bit", ()),
)
"""Name in the plan, kind of adapter, and the ways of sharding that are tried unless one is asked for."""


@dataclass(slots=True, frozen=True)
class Choice:
    """One way to run, and its memory on a device."""

    name: str
    sizes: RunSizes
    memory: Memory
    fits: bool
    vllm: int | None = None
    """Bytes of a colocated vLLM: its share where it fits, else the least that it needs; None without one."""


def choices(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> list[Choice]:
    """Returns the ways to run: full weights, LoRA, LoRA over 4 bits, and with several devices the ways to shard.

    Each has the largest micro-batch that fits, without checkpointing where one row fits so.
    """
    return [_largest(shape, name, way, device_bytes) for name, way in _ways(sizes)]


def recommended(found: list[Choice]) -> Choice | None:
    """Returns the first way that fits; the ways are in the order of how little they change."""
    return next((choice for choice in found if choice.fits), None)


def smallest_device(shape: ModelShape, sizes: RunSizes) -> int:
    """Returns the bytes of a device on which the least demanding of the ways fits."""
    needed = []
    for _, way in _ways(sizes):
        least = _with_micro_batch(way, 1, checkpointing=True)
        memory = predict(shape, least)
        beside = 0 if least.colocate is None else _beside_vllm(memory, least) + vllm_bytes(shape, least)[0]
        needed.append(max(memory.peak, beside))
    # The share of a colocated vLLM is a multiple of 1/1000.
    return int(min(needed) / (USABLE if sizes.colocate is None else USABLE - 0.001))


def vllm_length(sizes: RunSizes) -> int:
    """Returns the tokens of a row that a vLLM on the training devices is planned for."""
    return (sizes.colocate or Colocate()).max_model_length or sizes.prompt + sizes.completion


def vllm_bytes(shape: ModelShape, sizes: RunSizes) -> tuple[int, int]:
    """Returns the bytes that vLLM needs at least on each device, and those with which it samples all rows at once.

    These are its weights, a workspace, and the keys and values of one row, or of all.
    """
    ranks = (sizes.colocate or Colocate()).tensor_parallel_size
    itemsize = min(sizes.compute_bytes, sizes.weight_bytes)
    one_row = itemsize * cache_values(shape.text, vllm_length(sizes), latent=True, tensor_parallel_size=ranks)
    weights = math.ceil((1 + WORKSPACE) * shape.parameters * itemsize / ranks)
    return weights + one_row, weights + one_row * min(sizes.rows, MAX_NUM_SEQS)


def vllm_share(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> float | None:
    """Returns `vllm_gpu_memory_utilization`, the share of a device for vLLM beside training; None if it does not fit.

    The share is what all rows need at once where there is room for it, else the room, but at least one row's.
    """
    least, wanted = vllm_bytes(shape, sizes)
    room = USABLE * device_bytes - _beside_vllm(predict(shape, replace(sizes, samples=False)), sizes)
    share = min(math.ceil(1000 * wanted / device_bytes), math.floor(1000 * room / device_bytes)) / 1000
    return share if share * device_bytes >= least else None


def _beside_vllm(memory: Memory, sizes: RunSizes) -> int:
    """Bytes of training that vLLM's share leaves free: all, or with a vLLM that sleeps what stays while it samples."""
    return memory.held if (sizes.colocate or Colocate()).sleeps else memory.training


def _ways(sizes: RunSizes) -> list[tuple[str, RunSizes]]:
    """The ways to run by name. ValueError if there is none."""
    only, ways = sizes.only_sharding, []
    for name, adapter, tried in _WAYS:
        for sharding in ["ddp", *(tried if sizes.devices > 1 else ())] if only is None else [only]:
            is_possible = sharding != "fsdp2" or (sizes.colocate is None and sizes.optimizer in FSDP_OPTIMIZERS)
            is_possible &= adapter != "4bit" or sharding not in ("zero3", "fsdp2")
            if is_possible and name.startswith(sizes.way):
                ending = "" if sharding == "ddp" else f", {sharding}"
                ways.append((name + ending, replace(sizes, adapter=adapter, sharding=sharding)))
    if not ways:
        raise ValueError(
            f"fsdp goes with the optimizers {' and '.join(FSDP_OPTIMIZERS)}, and not with vLLM on the training "
            "devices; change that, or leave fsdp unset"
        )
    return ways


def _largest(shape: ModelShape, name: str, sizes: RunSizes, device_bytes: int) -> Choice:
    """A way with the largest micro-batch that fits, or of one row with checkpointing if none does."""
    for checkpointing in (sizes.checkpointing, True):
        for rows in _micro_batches(sizes):
            tried = _with_micro_batch(sizes, rows, checkpointing=checkpointing)
            memory = predict(shape, tried)
            share = None if sizes.colocate is None else vllm_share(shape, tried, device_bytes)
            if memory.peak <= device_bytes * USABLE and (sizes.colocate is None or share is not None):
                return Choice(name, tried, memory, True, None if share is None else int(share * device_bytes))
    least = _with_micro_batch(sizes, 1, checkpointing=True)
    vllm = None if sizes.colocate is None else vllm_bytes(shape, least)[0]
    return Choice(name, least, predict(shape, least), fits=False, vllm=vllm)


def _micro_batches(sizes: RunSizes) -> list[int]:
    """Micro-batches up to the largest that is tried, in falling order; steps and generation batches are multiples."""
    both = math.gcd(sizes.step_rows or sizes.micro_batch, sizes.rows)
    return [rows for rows in range(min(max(sizes.micro_batch, sizes.most_rows), both), 0, -1) if both % rows == 0]


def _with_micro_batch(sizes: RunSizes, rows: int, *, checkpointing: bool) -> RunSizes:
    """The same step in micro-batches of `rows`."""
    accumulates = rows < sizes.step_rows if sizes.step_rows else sizes.accumulates
    return replace(sizes, micro_batch=rows, checkpointing=checkpointing, accumulates=accumulates)
