"""Predicts the memory of each part of a run on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from groupgrad.apps.plan.shapes import ModelShape
from groupgrad.batching.packing import RowCost, split_to_size, total_cost
from groupgrad.memory.oom_retry import tokens_per_pass

Adapter = Literal["full", "lora", "4bit"]
Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]

OPTIMIZER_BYTES: dict[str, float] = {"adamw": 8.0, "adamw_8bit": 2.0, "adafactor": 0.1, "sgd": 0.0}
"""Bytes of the optimizer's states for each trained parameter in float32."""

_FIXED_STATES = ("adamw_8bit",)
"""Optimizers whose states are of one type, whatever the weights' is."""

UPDATE_TENSORS: dict[str, float] = {"adamw": 0.0, "adamw_8bit": 0.0, "adafactor": 2.0, "sgd": 0.0}
"""Temporary tensors of the size of one weight in the optimizer's update; torch's fused AdamW has none."""

_FOUR_BIT_BYTES = 0.5 + 4 / 64
_HEAD_SCRATCH = {"cpu": 3 * 512 * 2048 * 4, "cuda": 3 * 4096 * 8192 * 4}
_CUDA_CONTEXT = 600 * 2**20
_CPU_CONTEXT = 32 * 2**20
"""Code and tables that the first step of a process loads; measured, see `bench/plan_accuracy.py`."""
CPU_PROCESS = 470 * 2**20
"""Python with torch, transformers and datasets in a process on a CPU, before it has a model; measured."""
_ZERO3_BUCKET, _ZERO3_LIVE = 5 * 10**8, 10**9
"""DeepSpeed's defaults: numbers of the buffer of gradients, and weights that stay gathered."""
_SHARDS_CODE = 35 * 2**20
"""Code and tables of FSDP or DeepSpeed in a process on a CPU; measured."""


@dataclass(slots=True, frozen=True)
class Colocate:
    """Settings of a vLLM that samples on the training devices."""

    utilization: float | None = None
    """Share of a device that is asked for; None for any that fits."""
    max_model_length: int | None = None
    """Tokens of prompt and completion together; None for the model's context, or those of the run's rows."""
    tensor_parallel_size: int = 1
    sleeps: bool = False
    """vLLM frees its memory during training."""


@dataclass(slots=True, frozen=True)
class RunSizes:
    """Sizes and choices of a run."""

    prompt: int
    """Tokens of a prompt."""
    completion: int
    """Tokens of a completion, at the longest."""
    group: int
    """Completions of a prompt."""
    rows: int
    """Completions that a device samples at a time."""
    micro_batch: int
    """Completions of a training pass."""
    most_rows: int = 0
    """Completions of a training pass up to which larger ones are tried; 0 for none above `micro_batch`."""
    step_rows: int = 0
    """Completions of an optimizer step on a device; 0 for those of the micro-batch."""
    generation_rows: int = 0
    """Completions of a generation batch on a device; 0 for those of a step."""
    adapter: Adapter = "full"
    lora_rank: int = 16
    optimizer: str = "adamw"
    weight_bytes: int = 4
    """Bytes of a weight as it is loaded."""
    half: bool = False
    """Compute in bfloat16: by autocast, or since the weights are bfloat16 and no kernel widens them."""
    checkpointing: bool = False
    reference: bool = False
    """Keep a reference model (beta above 0, without an adapter)."""
    sharding: Sharding = "ddp"
    float32_gradients: bool = True
    """Sum gradients of weights in two bytes in float32 (`gradient_dtype`); DeepSpeed keeps its own."""
    samples: bool = True
    """Sample on this device with the native engine; otherwise vLLM does."""
    colocate: Colocate | None = None
    """A vLLM on the training devices, which must fit beside training."""
    accumulates: bool = False
    """A step has several micro-batches, so gradients of the first are held beside activations of the next."""
    devices: int = 1
    context_parallel_size: int = 1
    """Devices that train each row together, every one with a part of its tokens."""
    on_gpu: bool = True
    way: str = ""
    """The ways to run that are asked for, by the beginning of their names, such as "LoRA"; empty for all."""
    only_sharding: Sharding | None = None
    """The way to shard that is asked for; None for all."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the run, such as `bf16`."""


@dataclass(slots=True, frozen=True)
class Memory:
    """Bytes of the parts of a run on one device."""

    weights: int
    """In training; of a sharded model its shards and what is gathered of it at a time."""
    sampled: int
    """Weights while completions are sampled; of a sharded model its shards and a whole copy."""
    reference: int
    gradients: int
    optimizer: int
    activations: int
    """Activations of the largest pass, and the gradient of the output head, which is computed in the same pass."""
    scratch: int
    """Temporary tensors of the backward pass and of the output head."""
    update: int
    """Temporary tensors of the optimizer's update."""
    keys_values: int
    """Keys, values and recurrent states of the rows that are sampled at a time, and of their prompts."""
    context: int
    """Bytes that the device's library takes for itself; on a CPU the interpreter and its libraries."""
    accumulates: bool
    """Gradients are held beside whole activations."""

    @property
    def sampling(self) -> int:
        """Bytes in use while completions are sampled."""
        return self.context + self.sampled + self.reference + self.optimizer + self.keys_values

    @property
    def training(self) -> int:
        """Bytes in use in a step: in its backward passes, or in the optimizer's update.

        In a backward pass gradients take the place of activations layer by layer.
        """
        held = self.context + self.weights + self.reference + self.optimizer
        both = self.gradients + self.activations if self.accumulates else max(self.gradients, self.activations)
        return held + max(both + self.scratch, self.gradients + self.update)

    @property
    def peak(self) -> int:
        """The larger of both."""
        return max(self.sampling, self.training)


def predict(shape: ModelShape, sizes: RunSizes) -> Memory:
    """Predicts the memory of a run on one device."""
    trained = shape.parameters if sizes.adapter == "full" else shape.adapter_inputs * sizes.lora_rank
    weights, reference = _weights(shape, sizes), 0
    if sizes.reference and sizes.adapter == "full":
        reference = weights
    sampled = weights if sizes.samples else 0
    is_sharded = sizes.sharding in ("zero3", "fsdp2")
    if is_sharded:
        shards, gathered = weights // sizes.devices, _gathered(shape, sizes)
        sampled = shards + (shape.parameters * _compute_bytes(sizes) if sizes.samples else gathered)
        weights, reference = shards + gathered, reference // sizes.devices
    is_zero = sizes.sharding.startswith("zero")
    if is_zero:
        # DeepSpeed updates a float32 copy of what it trains, also of float32 weights.
        copies = 4 * trained // sizes.devices
        weights, sampled = weights + copies, sampled and sampled + copies
    sums_in_float32 = sizes.float32_gradients and not is_zero
    gradients = trained * (4 if sums_in_float32 else _state_bytes(sizes))
    scale = 1.0 if is_zero or sizes.optimizer in _FIXED_STATES else _state_bytes(sizes) / 4
    optimizer = int(trained * OPTIMIZER_BYTES[sizes.optimizer] * scale)
    if is_sharded or sizes.sharding == "zero2":
        gradients //= sizes.devices
    if sizes.sharding != "ddp":
        optimizer //= sizes.devices
    passes = pass_sizes(sizes, shape.hidden)
    tokens = _largest_pass(passes, sizes, shape.hidden)
    one_layer = int(shape.layer_bytes * tokens)
    activations = int((shape.all_layers_bytes + shape.other_bytes) * tokens)
    if sizes.checkpointing:
        kept = shape.hidden * (2 if sizes.half else 4)
        activations = int((kept * shape.layers + shape.other_bytes) * tokens) + one_layer
    if sizes.adapter == "full":
        activations += shape.head_parameters * sizes.weight_bytes
    if sizes.sharding == "zero2":
        activations = max(activations, trained * _state_bytes(sizes))
    return Memory(
        weights=weights,
        sampled=sampled or weights,
        reference=reference,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        scratch=_HEAD_SCRATCH["cuda" if sizes.on_gpu else "cpu"]
        + one_layer // 2
        + _unreduced(shape, sizes)
        + _zero_buffers(shape, trained, sizes)
        + _dequantized(shape, sizes)
        + _ring(shape, sizes, tokens),
        keys_values=_keys_values(shape, sizes) if sizes.samples else 0,
        update=_update(shape, sizes) + _before_update(trained, sizes),
        context=_context(sizes),
        accumulates=sizes.accumulates or len(passes) > 1,
    )


def _context(sizes: RunSizes) -> int:
    """Bytes of the device's library, or of a process on a CPU."""
    if sizes.on_gpu:
        return _CUDA_CONTEXT
    return CPU_PROCESS + _CPU_CONTEXT + (0 if sizes.sharding == "ddp" else _SHARDS_CODE)


def pass_sizes(sizes: RunSizes, hidden_size: int) -> list[int]:
    """Returns the tokens of each training pass that this device computes, of completions of full length.

    Each prompt counts once in a pass. On a CPU a larger micro-batch is cut as in training. Devices that train rows
    together make a pass for the micro-batch of each of them.
    """
    ranks = sizes.context_parallel_size
    costs = [RowCost(sizes.completion, sizes.prompt, row // sizes.group) for row in range(sizes.micro_batch)]
    limit = tokens_per_pass(hidden_size) * ranks
    parts = [range(len(costs))] if sizes.on_gpu else split_to_size(costs, limit)
    return [-(-total_cost(costs[row] for row in rows) // ranks) for rows in parts] * ranks


def _largest_pass(passes: list[int], sizes: RunSizes, hidden_size: int) -> int:
    """Tokens of the largest pass. Where passes are cut on a CPU, rows that end earlier fill one up to the limit."""
    total = sum(passes) // sizes.context_parallel_size
    return max(*passes, 0 if sizes.on_gpu else min(tokens_per_pass(hidden_size), total))


def _update(shape: ModelShape, sizes: RunSizes) -> int:
    """Bytes of temporary tensors in the update of the largest weight; 0 for an adapter, whose weights are small."""
    largest = shape.largest_parameter if sizes.adapter == "full" else 0
    return int(UPDATE_TENSORS[sizes.optimizer] * largest * _state_bytes(sizes))


def _state_bytes(sizes: RunSizes) -> int:
    """Bytes of a trained weight, and of each number that the optimizer keeps for it."""
    return sizes.weight_bytes if sizes.adapter == "full" else 4


def _compute_bytes(sizes: RunSizes) -> int:
    """Bytes of a weight that is gathered: FSDP gathers in the type that passes compute in."""
    return 2 if sizes.half and sizes.sharding == "fsdp2" else sizes.weight_bytes


def _outside_layers(shape: ModelShape) -> int:
    return max(0, shape.parameters - shape.layers * shape.layer_parameters)


def _gathered(shape: ModelShape, sizes: RunSizes) -> int:
    """Bytes of gathered weights: a layer and the next, under FSDP embeddings and head throughout a pass too.

    ZeRO-3 releases no weight that it uses again within `_ZERO3_LIVE` numbers.
    """
    count = 2 * shape.layer_parameters
    if sizes.sharding == "zero3":
        count = max(count, min(shape.parameters, _ZERO3_LIVE))
    if sizes.sharding == "fsdp2":
        count += _outside_layers(shape)
    return count * _compute_bytes(sizes)


def _unreduced(shape: ModelShape, sizes: RunSizes) -> int:
    """Bytes of whole gradients under FSDP, which wait to be reduced in float32.

    Those of a layer, and of embeddings and head from the head's backward pass on. Processes on CPUs (gloo) reduce in a
    copy.
    """
    if sizes.sharding != "fsdp2" or sizes.adapter != "full":
        return 0
    reduced = 4 if sizes.on_gpu else 8
    return (_outside_layers(shape) + shape.layer_parameters) * _compute_bytes(sizes) + reduced * shape.layer_parameters


def _zero_buffers(shape: ModelShape, trained: int, sizes: RunSizes) -> int:
    """Bytes of ZeRO-3's buffer of gradients, and of the copy of its content that is scattered.

    Of the buffer only what is used is resident on a CPU.
    """
    if sizes.sharding != "zero3":
        return 0
    used = min(trained, _ZERO3_BUCKET)
    return ((_ZERO3_BUCKET if sizes.on_gpu else used) + used) * _state_bytes(sizes)


def _dequantized(shape: ModelShape, sizes: RunSizes) -> int:
    """Bytes of the weight in 4 bits that a backward pass computes with, in the type that it computes in."""
    return shape.largest_linear * (2 if sizes.half else 4) if sizes.adapter == "4bit" else 0


def _before_update(trained: int, sizes: RunSizes) -> int:
    """Bytes of gradients beside the planned ones when DeepSpeed averages: ZeRO 1 and 2 divide whole ones then."""
    if sizes.sharding == "zero1":
        return trained * _state_bytes(sizes) // sizes.devices
    return trained * _state_bytes(sizes) if sizes.sharding == "zero2" else 0


def _ring(shape: ModelShape, sizes: RunSizes, tokens: int) -> int:
    """Bytes of a layer's keys and values that go around the devices of a row: those in use, and the next."""
    if sizes.context_parallel_size == 1:
        return 0
    return 2 * tokens * shape.layer_kv_values * (2 if sizes.half else 4)


def _weights(shape: ModelShape, sizes: RunSizes) -> int:
    if sizes.adapter == "full":
        return shape.parameters * sizes.weight_bytes
    adapter = shape.adapter_inputs * sizes.lora_rank * 4
    if sizes.adapter == "lora":
        return shape.parameters * sizes.weight_bytes + adapter
    others = shape.parameters - shape.linear_parameters
    return int(shape.linear_parameters * _FOUR_BIT_BYTES + others * sizes.weight_bytes) + adapter


def _keys_values(shape: ModelShape, sizes: RunSizes) -> int:
    prompts = -(-sizes.rows // sizes.group)
    tokens = sizes.rows * sizes.completion + prompts * sizes.prompt
    states = (sizes.rows + prompts) * shape.state_bytes
    return tokens * shape.kv_values * (2 if sizes.half else 4) + states
