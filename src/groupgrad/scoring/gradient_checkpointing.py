"""Gradient checkpointing for micro-batches whose activations exceed the free memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from groupgrad import dist
from groupgrad.batch import Batch
from groupgrad.memory.free_memory import free_bytes
from groupgrad.models.unwrapping import unwrap
from groupgrad.scoring.forward import ForwardOptions, forward_inputs, layout_for, score_tokens
from groupgrad.scoring.fused_modules import compiled_parts, restore_modules
from groupgrad.scoring.self_check import random_batch, reversed_prompts
from groupgrad.types import Prompt

logger = logging.getLogger(__name__)

FREE_FRACTION = 0.6
"""Fraction of the free memory for activations; gradients and temporary tensors need the rest."""

COPY_FRACTION = 0.4
"""Memory that a token's copy in attention keeps (query, key, value and output), relative to a token's; 0.2 to 0.35 were
measured."""


def activation_bytes_per_token(model: nn.Module, options: ForwardOptions) -> float:
    """Bytes that a forward pass of `model` saves for the backward pass per token, measured on random tokens.

    Tensors that do not grow with the tokens (weights, copies of them in another precision) do not count.
    """
    options = replace(options, aux_loss=False)
    small = random_batch(model)
    large = Batch.concat([small, reversed_prompts(small)])
    saved = [_saved_bytes(model, batch, options) for batch in (small, large)]
    return (saved[1] - saved[0]) / (_num_tokens(model, large, options) - _num_tokens(model, small, options))


def activation_bytes_per_value(model: nn.Module, options: ForwardOptions, example: Prompt, per_token: float) -> float:
    """Bytes that a forward pass saves per element of the image tensors, measured on the images of `example`.

    `per_token` is the result of `activation_bytes_per_token`.
    """
    options = replace(options, aux_loss=False)
    batches = [random_batch(model), random_batch(model, example)]
    saved = [_saved_bytes(model, batch, options) for batch in batches]
    num_tokens = _num_tokens(model, batches[1], options) - _num_tokens(model, batches[0], options)
    values = _num_image_values(model, options, batches[1])
    return max(0.0, (saved[1] - saved[0] - per_token * num_tokens) / max(1, values))


def _num_image_values(model: nn.Module, options: ForwardOptions, batch: Batch) -> int:
    """Elements of the image tensors that a forward pass computes, once a row without the shared layout."""
    images = list(batch.media or [None] * batch.num_prompts)
    of_rows = list(batch.row_media or [None] * batch.num_rows)
    if batch.num_rows and layout_for(model, options) != "shared":
        images = [media or images[prompt] for media, prompt in zip(of_rows, batch.prompt_of_row.tolist())]
    else:
        images += of_rows
    return sum(tensor.numel() for media in images if media is not None for tensor in media.tensors.values())


def _num_tokens(model: nn.Module, batch: Batch, options: ForwardOptions) -> int:
    """Tokens that a pass computes, padding included, and what copies in attention take of the memory of a token."""
    inputs = forward_inputs(model, batch.by_branch(), options)
    return inputs.shape.numel() + int(COPY_FRACTION * inputs.num_copied)


def _saved_bytes(model: nn.Module, batch: Batch, options: ForwardOptions) -> int:
    storages: dict[int, Any] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def record(tensor: torch.Tensor) -> None:
        # The graph keeps nothing: an output that its own node holds would stay in memory until a garbage collection.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage

    devices = [batch.completion_ids.device] if batch.completion_ids.device.type == "cuda" else []
    # The second hook is never called, as no backward pass follows.
    hooks = torch.autograd.graph.saved_tensors_hooks(record, torch.zeros_like)
    try:
        # `stays`: training has no hooks, and with them the modules would not compute as in training.
        with torch.random.fork_rng(devices), torch.enable_grad(), compiled_parts(model, stays=True), hooks:
            score_tokens(model, batch, options)
    finally:
        restore_modules(model)
    return sum(storage.nbytes() for storage in storages.values())


class CheckpointingByNeed:
    """Switches gradient checkpointing on for micro-batches whose activations would not fit, and off for the others.

    With `is_joint` the ranks share the model and must run it in the same way: all switch it on if one rank needs it.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ForwardOptions,
        checkpointing_options: dict[str, Any] | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        example: Prompt | None = None,
        *,
        is_joint: bool = False,
    ):
        self._is_joint = is_joint
        self._model: Any = unwrap(model)
        self._options = options
        self._checkpointing_options = dict(checkpointing_options or {"use_reentrant": False})
        modes = {module: module.training for module in model.modules()}
        try:
            with precision():
                model.train()  # dropout saves masks, and may need another layout
                self._bytes_per_token = activation_bytes_per_token(model, options)
                self._bytes_per_value = 0.0
                if example is not None:
                    self._bytes_per_value = activation_bytes_per_value(model, options, example, self._bytes_per_token)
        finally:
            for module, mode in modes.items():
                module.training = mode
        self.is_on = False

    def prepare(self, batch: Batch) -> None:
        """Switches gradient checkpointing for a forward pass of the batch. Collective if it `is_joint`."""
        num_tokens = _num_tokens(self._model, batch, self._options)
        num_values = _num_image_values(self._model, self._options, batch) if batch.has_images else 0
        device = next(self._model.parameters()).device
        needed = num_tokens * self._bytes_per_token + num_values * self._bytes_per_value
        free = FREE_FRACTION * (free_bytes(device) - self._gradients_to_come(device))
        is_needed = needed > free
        is_on = any(dist.all_gather_objects(is_needed)) if self._is_joint else is_needed
        if is_needed and not self.is_on:
            _warn(f"{num_tokens} tokens{' and their images' if num_values else ''}", needed, free)
        self.switch(is_on)

    def _gradients_to_come(self, device: torch.device) -> int:
        """Bytes of gradients, summed in float32, without memory on a GPU yet; on CPUs `FREE_FRACTION` leaves it."""
        if device.type != "cuda":
            return 0
        trained = (p for p in self._model.parameters() if p.requires_grad and p.grad is None and p.device == device)
        return sum(4 * parameter.numel() for parameter in trained)

    def switch(self, is_on: bool) -> None:
        """Switches gradient checkpointing, whatever memory there is; nothing if it `is_on` already, or off."""
        if is_on == self.is_on:
            return
        self.is_on = is_on
        if is_on:
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self._checkpointing_options)
            # Reentrant checkpointing passes no gradient to an adapter unless the layer's input requires one. Releases
            # of transformers differ in whether they see to it.
            is_reentrant = self._checkpointing_options.get("use_reentrant") and hasattr(self._model, "peft_config")
            if is_reentrant and not getattr(self._model, "_require_grads_hooks", None):
                self._model.enable_input_require_grads()
        else:
            self._model.gradient_checkpointing_disable()
            self._model.disable_input_require_grads()  # which transformers leaves on the embeddings


def _warn(what: str, needed: float, free: float) -> None:
    logger.warning(
        "activations of %s would take %.1f GiB and %.1f GiB are free for them: gradient checkpointing is on, at the "
        "cost of a second forward pass; set gradient_checkpointing=False to forbid it",
        what,
        needed / 2**30,
        free / 2**30,
    )
