"""Chooses settings with which a run fits into a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from groupgrad.apps.plan.memory import Adapter, Colocate, Memory, RunSizes, Sharding, predict
from groupgrad.apps.plan.shapes import ModelShape
from groupgrad.apps.plan.vllm_memory import ServedBytes, TrainingBytes, memory_problem
from groupgrad.integrations.vllm.colocate_start import MAX_NUM_SEQS, ColocateOptions

USABLE = 0.92
"""Share of a device that is planned for; the allocator's gaps take the rest."""


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
    """Settings of a vLLM beside training that `memory_problem` accepts."""

    utilization: float
    """`vllm_gpu_memory_utilization`: share of the device."""
    max_model_length: int | None
    """`vllm_max_model_length`, in tokens; None where a row of the model's whole context fits."""


def vllm_share(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> VLLMShare | None:
    """Returns the share of a device for vLLM beside a trainer that does not sample; None if it does not fit.

    The share holds what vLLM needs at least (weights, a workspace and one row of the context), and the keys and values
    of the rows that vLLM samples where there is room for them. Where no row of the model's whole context fits, rows of
    the run's length are tried.
    """
    colocate, sampling = sizes.colocate or Colocate(), replace(sizes, samples=True, rows=min(sizes.rows, MAX_NUM_SEQS))
    all_rows = predict(shape, sampling).keys_values
    training = predicted_training_bytes(predict(shape, replace(sizes, samples=False)))
    memory = {"total": device_bytes, "available": int(device_bytes * USABLE)}
    room = memory["available"] - (training.while_sampling if colocate.sleeps else training.total)
    lengths = (
        (None, sizes.prompt + sizes.completion) if colocate.max_model_length is None else (colocate.max_model_length,)
    )
    for length in lengths:
        options = _vllm_options(sizes, length)
        served = ServedBytes.of_config(*_served(shape, sizes), options)
        wanted = served.total + max(0, all_rows - served.one_row)
        share = math.ceil(1000 * wanted / device_bytes) / 1000
        share = min(share, math.floor(1000 * room / device_bytes) / 1000)
        for tried in (share,) if colocate.utilization is None else (colocate.utilization, share):
            of_share = replace(options, memory_utilization=tried)
            if memory_problem(served, training, of_share, **memory) is None:
                return VLLMShare(tried, length)
    return None


def predicted_training_bytes(memory: Memory) -> TrainingBytes:
    """Returns the predicted memory of training in the parts that are compared with vLLM's."""
    return TrainingBytes(
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


def fitting_with_server(shape: ModelShape, sizes: RunSizes, device_bytes: int) -> Choice | None:
    """The way that fits if a vLLM server on other devices samples, where it differs from the one that fits as it is.

    A model in shards is sampled from by the native engine as a whole copy, which a server does without.
    """
    if not (sizes.samples or sizes.colocate):
        return None
    best = recommended(choices(shape, sizes, device_bytes))
    served = recommended(choices(shape, replace(sizes, samples=False, colocate=None), device_bytes))
    return served if served is not None and (best is None or best.name != served.name) else None


FSDP_OPTIMIZERS = ("adamw", "sgd")

_WAYS: tuple[tuple[str, Adapter, tuple[Sharding, ...]], ...] = (
    ("full", "full", ("zero1", "zero2", "zero3", "fsdp2")),
    ("LoRA", "lora", ("zero3", "fsdp2")),
    ("4-bit", "4bit", ()),
)
"""Name in the plan, kind of adapter, and the ways of sharding that are tried unless one is asked for."""


def _ways(sizes: RunSizes) -> list[tuple[str, RunSizes]]:
    """The ways to run by name. ValueError if there is none."""
    only, may_shard = sizes.only_sharding, sizes.devices > 1 and sizes.context_parallel_size == 1
    ways = []
    for name, adapter, tried in _WAYS:
        for sharding in ["ddp", *(tried if may_shard else ())] if only is None else [only]:
            # bitsandbytes' packed weights are not divided; `FSDP_OPTIMIZERS` update a shard as they would the whole.
            is_possible = not (adapter == "4bit" and sharding in ("zero3", "fsdp2"))
            if sharding == "fsdp2":
                is_possible &= sizes.colocate is None and sizes.optimizer in FSDP_OPTIMIZERS
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
    least = _with_micro_batch(sizes, 1, checkpointing=True)
    for checkpointing in (sizes.checkpointing, True):
        for rows in _micro_batches(sizes):
            tried = _with_micro_batch(sizes, rows, checkpointing=checkpointing)
            memory = predict(shape, tried)
            if memory.peak > device_bytes * USABLE:
                continue
            if tried.colocate is None:
                return Choice(name, tried, memory, fits=True)
            if (share := vllm_share(shape, tried, device_bytes)) is not None:
                return Choice(name, tried, memory, fits=True, vllm=int(share.utilization * device_bytes))
    vllm = None if sizes.colocate is None else _least_served(shape, sizes).total
    return Choice(name, least, predict(shape, least), fits=False, vllm=vllm)


def _needed(shape: ModelShape, sizes: RunSizes) -> int:
    """Bytes of the peak, and of a colocated vLLM with rows of the run's length beside training."""
    memory = predict(shape, sizes)
    if sizes.colocate is None:
        return memory.peak
    training = predicted_training_bytes(memory)
    beside = training.while_sampling if sizes.colocate.sleeps else training.total
    return max(memory.peak, training.total, beside + _least_served(shape, sizes).total)


def _least_served(shape: ModelShape, sizes: RunSizes) -> ServedBytes:
    """Bytes of a vLLM whose rows have the run's length."""
    length = (sizes.colocate or Colocate()).max_model_length or sizes.prompt + sizes.completion
    return ServedBytes.of_config(*_served(shape, sizes), _vllm_options(sizes, length))


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
