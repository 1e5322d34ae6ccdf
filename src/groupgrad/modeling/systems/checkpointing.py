"""What a forward pass keeps for its backward pass, what is free, and gradient checkpointing where the one exceeds the
other."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from groupgrad.batch import Batch
from groupgrad.modeling.scoring.forward import ForwardOptions, layout_for, score_tokens, unwrap
from groupgrad.modeling.self_check import random_batch, reversed_prompts
from groupgrad.types import Media, Prompt

logger = logging.getLogger(__name__)

FREE_SHARE = 0.6
"""Share of the free memory that activations may take; gradients and scratch memory need some too."""


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors of this process may take on `device` now.

    On a CPU the limit of the process's control group counts, and the ranks of one machine share what is free.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = min(psutil.virtual_memory().available, _free_in_control_group())
    return free // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _free_in_control_group() -> int:
    """Bytes left below the memory limit of a container; very many without one. Cached files can be dropped, so they
    are free."""
    versions = [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ]
    for *names, cached in versions:
        try:
            limit, usage, statistics = (Path("/sys/fs/cgroup", name).read_text().strip() for name in names)
        except OSError:
            continue
        if limit.isdigit() and usage.isdigit():
            lines = dict(line.split(maxsplit=1) for line in statistics.splitlines() if " " in line)
            return max(int(limit) - int(usage) + int(lines.get(cached, "0")), 0)
    return 1 << 62


def activation_bytes_per_token(model: nn.Module, options: ForwardOptions) -> float:
    """Bytes that a forward pass of `model` keeps for each token, measured on random tokens.

    What does not grow with the tokens (weights, copies of them in another precision) does not count.
    """
    small = random_batch(model)
    large = Batch.concat([small, reversed_prompts(small)])
    kept = [_kept_bytes(model, batch, options) for batch in (small, large)]
    return (kept[1] - kept[0]) / (_tokens(large) - _tokens(small))


def activation_bytes_per_value(model: nn.Module, options: ForwardOptions, example: Prompt, per_token: float) -> float:
    """Bytes that a forward pass keeps for each number of the images' tensors, measured on the images of `example`.

    `per_token` is what it keeps for each token.
    """
    batches = [random_batch(model), random_batch(model, example)]
    kept = [_kept_bytes(model, batch, options) for batch in batches]
    tokens = _tokens(batches[1]) - _tokens(batches[0])
    values = sum(map(image_values, _images(model, options, batches[1])))
    return max(0.0, (kept[1] - kept[0] - per_token * tokens) / max(1, values))


def _images(model: nn.Module, options: ForwardOptions, batch: Batch) -> list[Media | None]:
    """Those that a forward pass computes: where prompts are not shared, each row has its own copy."""
    media, owners = list(batch.media or [None] * batch.num_prompts), batch.prompt_of_row.tolist()
    own = list(batch.row_media or [None] * batch.num_rows)
    if batch.num_rows and layout_for(model, options) != "shared":
        return [images or media[q] for images, q in zip(own, owners)]
    return [*media, *own]


def image_values(media: Media | None) -> int:
    """Numbers that the images of a prompt have for the model."""
    return 0 if media is None else sum(tensor.numel() for tensor in media.tensors.values())


def _tokens(batch: Batch) -> int:
    return len(batch.prompt_ids) + batch.num_tokens


def _kept_bytes(model: nn.Module, batch: Batch, options: ForwardOptions) -> int:
    sizes: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    devices = [batch.completion_ids.device] if batch.completion_ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, _same):
        scores = score_tokens(model, batch, replace(options, aux_loss=False))
    del scores
    return sum(sizes.values())


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class CheckpointingByNeed:
    """Turns gradient checkpointing on for micro-batches whose activations would not fit, and off for all others."""

    def __init__(
        self,
        model: nn.Module,
        options: ForwardOptions,
        checkpointing_options: dict[str, Any] | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        example: Prompt | None = None,
    ):
        self._model: Any = unwrap(model)
        self._options = options
        self._arguments = dict(checkpointing_options or {"use_reentrant": False})
        modes = {module: module.training for module in model.modules()}
        try:
            with precision():
                model.train()  # dropout keeps masks, and may take another layout
                self._bytes_per_token = activation_bytes_per_token(model, options)
                self._bytes_per_value = 0.0
                if example is not None:
                    self._bytes_per_value = activation_bytes_per_value(model, options, example, self._bytes_per_token)
        finally:
            for module, mode in modes.items():
                module.training = mode
        self.is_on = False

    def prepare(self, batch: Batch) -> None:
        """Get the model ready for a forward pass of the batch."""
        num_tokens = len(batch.prompt_ids) + batch.num_tokens
        images = _images(self._model, self._options, batch)
        if batch.num_rows and layout_for(self._model, self._options) == "dense":
            lengths = batch.prompt_offsets.diff()[batch.prompt_of_row] + batch.offsets.diff()
            num_tokens = batch.num_rows * int(lengths.max())
        device = next(self._model.parameters()).device
        needed = num_tokens * self._bytes_per_token + sum(map(image_values, images)) * self._bytes_per_value
        free = FREE_SHARE * free_bytes(device)
        if (needed > free) == self.is_on:
            return
        self.is_on = needed > free
        if self.is_on:
            logger.warning(
                "activations of %d tokens%s would take %.1f GiB and %.1f GiB are free for them: gradient checkpointing "
                "is on, at the cost of a second forward pass; set gradient_checkpointing=False to forbid it",
                num_tokens,
                " and their images" if any(images) else "",
                needed / 2**30,
                free / 2**30,
            )
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self._arguments)
            if self._arguments.get("use_reentrant") and hasattr(self._model, "peft_config"):
                self._model.enable_input_require_grads()
        else:
            self._model.gradient_checkpointing_disable()
            if self._arguments.get("use_reentrant") and hasattr(self._model, "peft_config"):
                self._model.disable_input_require_grads()
