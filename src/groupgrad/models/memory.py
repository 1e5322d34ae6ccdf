"""What a forward pass keeps for its backward pass, what is free, and gradient checkpointing where the one exceeds the
other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from groupgrad.models.forward import ForwardOptions, layout_for, score_tokens, unwrap
from groupgrad.models.startup import random_batch
from groupgrad.types import Batch

logger = logging.getLogger(__name__)

FREE_SHARE = 0.6
"""Share of the free memory that activations may take; gradients and scratch memory need some too."""


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors on `device` may take now; on a CPU the limit of the process's control group counts."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(psutil.virtual_memory().available, _free_in_control_group())


def _free_in_control_group() -> int:
    """Bytes left below the memory limit of a container; very many without one."""
    names = {"memory.max": "memory.current", "memory/memory.limit_in_bytes": "memory/memory.usage_in_bytes"}
    for limit, usage in names.items():
        try:
            texts = [Path("/sys/fs/cgroup", name).read_text().strip() for name in (limit, usage)]
        except OSError:
            continue
        if all(text.isdigit() for text in texts):
            return max(int(texts[0]) - int(texts[1]), 0)
    return 1 << 62


def activation_bytes_per_token(model: nn.Module, options: ForwardOptions) -> float:
    """Bytes that a forward pass of `model` keeps for each token, measured on random tokens; weights do not count."""
    sizes: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = random_batch(model)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scores = score_tokens(model, batch, replace(options, aux_loss=False))
    del scores
    return sum(sizes.values()) / (len(batch.prompt_ids) + batch.num_tokens)


class CheckpointingByNeed:
    """Turns gradient checkpointing on for micro-batches whose activations would not fit, and off for all others."""

    def __init__(
        self,
        model: nn.Module,
        options: ForwardOptions,
        checkpointing_options: dict[str, Any] | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self._model: Any = unwrap(model)
        self._is_flat = layout_for(model, options) != "dense"
        self._arguments = dict(checkpointing_options or {"use_reentrant": False})
        with precision():
            self._bytes_per_token = activation_bytes_per_token(model, options)
        self.is_on = False

    def prepare(self, batch: Batch) -> None:
        """Get the model ready for a forward pass of the batch."""
        num_tokens = len(batch.prompt_ids) + batch.num_tokens
        if not self._is_flat and batch.num_rows:
            lengths = batch.prompt_offsets.diff()[batch.prompt_of_row] + batch.offsets.diff()
            num_tokens = batch.num_rows * int(lengths.max())
        device = next(self._model.parameters()).device
        needed, free = num_tokens * self._bytes_per_token, FREE_SHARE * free_bytes(device)
        if (needed > free) == self.is_on:
            return
        self.is_on = needed > free
        if self.is_on:
            logger.warning(
                "activations of %d tokens would take %.1f GiB and %.1f GiB are free for them: gradient checkpointing "
                "is on, at the cost of a second forward pass; set gradient_checkpointing=False to forbid it",
                num_tokens,
                needed / 2**30,
                free / 2**30,
            )
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self._arguments)
            if hasattr(self._model, "peft_config") and hasattr(self._model, "enable_input_require_grads"):
                self._model.enable_input_require_grads()
        else:
            self._model.gradient_checkpointing_disable()
