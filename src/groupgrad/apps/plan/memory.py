"""Predicts the memory of each part of a run on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from groupgrad.apps.plan.shapes import ModelShape
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
"""Bytes of a weight in 4 bits, with a float32 scale for each block of 64."""

_HEAD_SCRATCH = {"cpu": 3 * 512 * 2048 * 4, "cuda": 3 * 4096 * 8192 * 4}
_CUDA_CONTEXT = 600 * 2**20
CPU_PROCESS = 470 * 2**20
"""Python with torch, transformers and datasets in a process on a CPU, before it has a model; measured."""
_FIRST_STEP = 32 * 2**20
"""Code and tables that the first step of a process on a CPU loads; measured, see `bench/plan_accuracy.py`."""
_ZERO3_BUCKET, _ZERO3_LIVE = 5 * 10**8, 10**9
"""DeepSpeed's defaults: numbers of the buffer of gradients, and weights that stay gathered."""


@dataclass(slots=True, frozen=True)
class Colocate:
    """Settings of a vLLM that samples on the training devices."""

    max_model_length: int | None = None
    """Tokens of prompt and completion together; None for those of the run's rows."""
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
    """Completions of a generation batch on a device, which it samples at a time."""
    micro_batch: int
    """Completions of a training pass."""
    most_rows: int = 0
    """Completions of a training pass up to which larger ones are tried; 0 for none above `micro_batch`."""
    step_rows: int = 0
    """Completions of an optimizer step on a device; 0 for those of the micro-batch."""
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
    on_gpu: bool = True
    way: str = ""
    """The ways to run that are asked for, by the beginning of their names, such as "LoRA"; empty for all."""
    only_sharding: Sharding | None = None
    """The way to shard that is asked for; None for all."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number that a pass computes."""
        return 2 if self.half else 4

    @property
    def saved_bytes(self) -> int:
        """Bytes of a number that a layer saves; under autocast some are float32."""
        return 3 if self.half and self.weight_bytes == 4 else self.compute_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a trained weight, and of each number that the optimizer keeps for it."""
        return self.weight_bytes if self.adapter == "full" else 4


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
    def held(self) -> int:
        """Bytes that stay in use while vLLM samples."""
        return self.context + self.weights + self.reference + self.optimizer

    @property
    def sampling(self) -> int:
        """Bytes in use while completions are sampled."""
        return self.context + self.sampled + self.reference + self.optimizer + self.keys_values

    @property
    def training(self) -> int:
        """Bytes in use in a step: in its backward passes, or in the optimizer's update.

        In a backward pass gradients take the place of activations layer by layer.
        """
        both = self.gradients + self.activations if self.accumulates else max(self.gradients, self.activations)
        return self.held + max(both + self.scratch, self.gradients + self.update)

    @property
    def peak(self) -> int:
        """The larger of both."""
        return max(self.sampling, self.training)


def predict(shape: ModelShape, sizes: RunSizes) -> Memory:
    """Predicts the memory of a run on one device."""
    is_full, devices = sizes.adapter == "full", sizes.devices
    is_zero, is_sharded = sizes.sharding.startswith("zero"), sizes.sharding in ("zero3", "fsdp2")
    trained = shape.parameters if is_full else shape.adapter_inputs * sizes.lora_rank
    in_4_bits = shape.linear_parameters if sizes.adapter == "4bit" else 0
    loaded = int(in_4_bits * _FOUR_BIT_BYTES) + (shape.parameters - in_4_bits) * sizes.weight_bytes
    weights = loaded + (0 if is_full else 4 * trained)
    reference = weights if sizes.reference and is_full else 0
    sampled = weights if sizes.samples else 0
    if is_sharded:
        shards, gathered = weights // devices, _gathered(shape, sizes)
        sampled = shards + (shape.parameters * _gathered_bytes(sizes) if sizes.samples else gathered)
        weights, reference = shards + gathered, reference // devices
    if is_zero:
        # DeepSpeed updates a float32 copy of what it trains, also of float32 weights.
        copies = 4 * trained // devices
        weights, sampled = weights + copies, sampled and sampled + copies
    gradients = trained * (4 if sizes.float32_gradients and not is_zero else sizes.state_bytes)
    scale = 1.0 if is_zero or sizes.optimizer in _FIXED_STATES else sizes.state_bytes / 4
    optimizer = int(trained * OPTIMIZER_BYTES[sizes.optimizer] * scale)
    tokens, num_passes = _largest_pass(sizes, shape.hidden)
    one_layer = shape.largest_saved * sizes.saved_bytes * tokens
    activations = (shape.saved_values + 2 * shape.hidden) * sizes.saved_bytes * tokens
    if sizes.checkpointing:
        activations = shape.hidden * (shape.layers + 2) * sizes.compute_bytes * tokens + one_layer
    activations += shape.head_parameters * sizes.weight_bytes if is_full else 0
    if sizes.sharding == "zero2":
        activations = max(activations, trained * sizes.state_bytes)
    return Memory(
        weights=weights,
        sampled=sampled or weights,
        reference=reference,
        gradients=gradients // devices if is_sharded or sizes.sharding == "zero2" else gradients,
        optimizer=optimizer if sizes.sharding == "ddp" else optimizer // devices,
        activations=activations,
        scratch=_HEAD_SCRATCH["cuda" if sizes.on_gpu else "cpu"] + one_layer // 2 + _buffers(shape, trained, sizes),
        keys_values=_keys_values(shape, sizes) if sizes.samples else 0,
        update=_update(shape, trained, sizes),
        context=_CUDA_CONTEXT if sizes.on_gpu else CPU_PROCESS + _FIRST_STEP,
        accumulates=sizes.accumulates or num_passes > 1,
    )


def _largest_pass(sizes: RunSizes, hidden_size: int) -> tuple[int, int]:
    """Tokens of the largest training pass of completions of full length, and the number of passes.

    Each prompt counts once in a pass. On a CPU passes are cut where they have more tokens than a limit, and rows fill
    one up to it.
    """
    row, prompt = sizes.completion, sizes.prompt
    total = sizes.micro_batch * row + -(-sizes.micro_batch // sizes.group) * prompt
    limit = total if sizes.on_gpu else max(row + prompt, tokens_per_pass(hidden_size))
    return min(total, limit), -(-total // limit)


def _gathered_bytes(sizes: RunSizes) -> int:
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
    else:
        count += _outside_layers(shape)
    return count * _gathered_bytes(sizes)


def _buffers(shape: ModelShape, trained: int, sizes: RunSizes) -> int:
    """Bytes of gradients on their way to other ranks, for a model in shards.

    Under FSDP those of a layer, and of embeddings and head from the head's backward pass on, wait to be reduced in
    float32; gloo reduces in a copy. ZeRO-3 has a buffer, and a copy of its content that is scattered.
    """
    if sizes.sharding == "fsdp2" and sizes.adapter == "full":
        whole = (_outside_layers(shape) + shape.layer_parameters) * _gathered_bytes(sizes)
        return whole + (4 if sizes.on_gpu else 8) * shape.layer_parameters
    if sizes.sharding == "zero3":
        used = min(trained, _ZERO3_BUCKET)
        return ((_ZERO3_BUCKET if sizes.on_gpu else used) + used) * sizes.state_bytes
    return 0


def _update(shape: ModelShape, trained: int, sizes: RunSizes) -> int:
    """Bytes of temporary tensors in the update of the largest weight; 0 for an adapter, whose weights are small.

    ZeRO 1 and 2 divide whole gradients then.
    """
    largest = shape.largest_parameter if sizes.adapter == "full" else 0
    whole = {"zero1": trained // sizes.devices, "zero2": trained}.get(sizes.sharding, 0)
    return int((UPDATE_TENSORS[sizes.optimizer] * largest + whole) * sizes.state_bytes)


def _keys_values(shape: ModelShape, sizes: RunSizes) -> int:
    prompts = -(-sizes.rows // sizes.group)
    tokens = sizes.rows * sizes.completion + prompts * sizes.prompt
    return tokens * shape.kv_values * sizes.compute_bytes + (sizes.rows + prompts) * shape.state_bytes
