"""Gathers the parameters of models that are sharded over ranks, by DeepSpeed ZeRO-3 or by FSDP 2.

In training the hooks of either gather each module's parameters for its forward and its backward pass. Such a pass is a
collective, so all ranks must make the same number of passes; a rank without rows runs one dummy token (`forward.py`).
Sampling needs all parameters throughout, and passes outside of training leave no parameter gathered: `gather_all` and
`gather_per_module` serve these cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from groupgrad.integrations.sharding import fsdp, zero3
from groupgrad.models.shards import is_fully_sharded, is_shard, is_zero_shard, shard_values


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gathers the parameters of `module`, which must not be changed inside. Collective."""
    with zero3.gathered(module.parameters()), fsdp.whole_parameters(module):
        yield


@contextmanager
def gather_all(model: nn.Module) -> Iterator[None]:
    """Gathers all parameters of `model` on every rank; inside, its passes are not collectives. Collective on entry.

    Needs memory for all parameters. Nothing may be trained inside.
    """
    if is_fully_sharded(model):
        with fsdp.unsharded(model), _unhooked(model):
            yield
    elif any(zero3.is_absent(parameter) for parameter in model.parameters()):
        with zero3.gathered(model.parameters()), _unhooked(model):
            yield
    else:
        yield


@contextmanager
def gather_per_module(model: nn.Module) -> Iterator[None]:
    """Inside, passes of `model` without gradient gather its parameters, before training too. Each pass is a collective.

    A rank needs memory for its shards and the largest module, under FSDP for embeddings, head and the largest layer.
    """
    if is_fully_sharded(model):
        try:
            yield
        finally:
            fsdp.reshard(model)
    else:
        with zero3.gather_per_module(model):
            yield


class ShardSnapshot:
    """A copy of this rank's shards of a model's current weights."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._shards = {name: shard.clone() for name, shard in self._current()}

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of the copied shards."""
        yield from self._shards.items()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the copied weights; afterwards its own are restored bitwise."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, shard in self._current():
            current = shard.clone()
            shard.copy_(self._shards[name])
            self._shards[name].copy_(current)

    def _current(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and shards of the model, which the next pass gathers."""
        fsdp.reshard(self._model)
        zero3.release(self._model.parameters())
        parameters: Any = self._model.named_parameters()
        for name, parameter in parameters:
            if is_zero_shard(parameter) or is_shard(parameter):
                yield name, shard_values(parameter)


@contextmanager
def _unhooked(model: nn.Module) -> Iterator[None]:
    """Removes the hooks that would free gathered parameters, and restores them in their old order afterwards."""
    saved = [(hooks, dict(hooks)) for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
    for hooks, before in saved:
        for key, hook in before.items():
            if _gathers(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in saved:
            added = {key: hook for key, hook in hooks.items() if key not in before}
            restored = {key: hook for key, hook in before.items() if key in hooks or _gathers(hook)}
            hooks.clear()
            hooks.update({**restored, **added})


def _gathers(hook: Any) -> bool:
    return zero3.is_hook(hook) or fsdp.is_hook(hook)
