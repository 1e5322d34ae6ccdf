"""Predicts the memory of each part of a run on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from groupgrad.modeling.systems.oom_retry import TOKENS_PER_PASS_CPU
from groupgrad.planning.shapes import ModelShape

Adapter = Literal["full", "lora", "4bit"]
Sharding = Literal["ddp", "zero1", "zero2", "zero3"]

OPTIMIZER_BYTES: dict[str, float] = {"adamw": 8.0, "adamw_8bit": 2.0, "adafactor": 0.1, "sgd": 0.0}
"""Bytes of the optimizer's states for each trained parameter in float32."""

_FOUR_BIT_BYTES = 0.5 + 4 / 64
_HEAD_SCRATCH = {"cpu": 3 * 512 * 2048 * 4, "cuda": 3 * 4096 * 8192 * 4}
_CUDA_CONTEXT = 600 * 2**20


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
    adapter: Adapter = "full"
    lora_rank: int = 16
    optimizer: str = "adamw"
    weight_bytes: int = 4
    """Bytes of a weight as it is loaded."""
    half: bool = False
    """Compute in bfloat16 by autocast."""
    checkpointing: bool = False
    reference: bool = False
    """Keep a reference model (beta above 0, without an adapter)."""
    sharding: Sharding = "ddp"
    accumulates: bool = False
    """A step has several micro-batches, so gradients of the first are held beside activations of the next."""
    devices: int = 1
    on_gpu: bool = True


@dataclass(slots=True, frozen=True)
class Memory:
    """Bytes of the parts of a run on one device."""

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    scratch: int
    """Temporary tensors of the backward pass and of the output head."""
    keys_values: int
    context: int
    """Bytes that the device's library takes for itself."""
    accumulates: bool
    """Gradients are held beside whole activations."""

    @property
    def sampling(self) -> int:
        """Bytes in use while completions are sampled."""
        return self.context + self.weights + self.reference + self.optimizer + self.keys_values

    @property
    def training(self) -> int:
        """Bytes in use in a backward pass, in which gradients take the place of activations layer by layer."""
        held = self.context + self.weights + self.reference + self.optimizer + self.scratch
        if self.accumulates:
            return held + self.gradients + self.activations
        return held + max(self.gradients, self.activations)

    @property
    def peak(self) -> int:
        """The larger of both."""
        return max(self.sampling, self.training)


def predict(shape: ModelShape, sizes: RunSizes) -> Memory:
    """Predicts the memory of a run on one device."""
    trained = _trained(shape, sizes)
    weights, reference = _weights(shape, sizes), 0
    if sizes.reference and sizes.adapter == "full":
        reference = weights
    is_sharded = sizes.sharding == "zero3"
    if is_sharded:  # one layer and the next are gathered while they compute
        gathered = 2 * shape.layer_parameters * sizes.weight_bytes
        weights, reference = weights // sizes.devices + gathered, reference // sizes.devices
    gradients = trained * _gradient_bytes(sizes)
    optimizer = int(trained * OPTIMIZER_BYTES[sizes.optimizer] * _gradient_bytes(sizes) / 4)
    if is_sharded or sizes.sharding == "zero2":
        gradients //= sizes.devices
    if sizes.sharding != "ddp":
        optimizer //= sizes.devices
    tokens = pass_tokens(sizes)
    one_layer = int(shape.layer_bytes * tokens)
    activations = int((shape.layer_bytes * shape.layers + shape.other_bytes) * tokens)
    if sizes.checkpointing:
        kept = shape.hidden * (2 if sizes.half else 4)
        activations = int((kept * shape.layers + shape.other_bytes) * tokens) + one_layer
    return Memory(
        weights=weights,
        reference=reference,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        scratch=_HEAD_SCRATCH["cuda" if sizes.on_gpu else "cpu"] + one_layer // 2,
        keys_values=_keys_values(shape, sizes),
        context=_CUDA_CONTEXT if sizes.on_gpu else 0,
        accumulates=sizes.accumulates,
    )


def pass_tokens(sizes: RunSizes) -> int:
    """Returns the tokens of a training pass whose completions have full length; each prompt counts once.

    On a CPU a larger micro-batch is cut between its groups.
    """
    groups = max(1, -(-sizes.micro_batch // sizes.group))
    tokens = sizes.micro_batch * sizes.completion + groups * sizes.prompt
    if sizes.on_gpu or tokens <= TOKENS_PER_PASS_CPU:
        return tokens
    of_group = min(sizes.group, sizes.micro_batch) * sizes.completion + sizes.prompt
    return max(of_group, TOKENS_PER_PASS_CPU // of_group * of_group)


def _trained(shape: ModelShape, sizes: RunSizes) -> int:
    return shape.parameters if sizes.adapter == "full" else shape.adapter_inputs * sizes.lora_rank


def _gradient_bytes(sizes: RunSizes) -> int:
    return sizes.weight_bytes if sizes.adapter == "full" else 4


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
    return tokens * shape.kv_values * (2 if sizes.half else sizes.weight_bytes)
