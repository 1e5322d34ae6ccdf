"""Keeps base models as they were loaded, so that several adapters in one process share their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

_IN_USE: ContextVar[BaseModels | None] = ContextVar("base models", default=None)


class BaseModels:
    """The base models that adapters of this process share."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[nn.Module, torch.Tensor]] = {}
        """For each source of loading: the model without an adapter, and the random state that loading left."""
        self._addresses: set[tuple[torch.device, int]] = set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which `shared_base` and `separate_trained` take part."""
        token = _IN_USE.set(self)
        try:
            yield
        finally:
            _IN_USE.reset(token)

    def copy_of(self, key: Any, load: Callable[[], nn.Module]) -> nn.Module:
        """A model with modules of its own over the weights that `load` has given for this key."""
        if key not in self._kept:
            self._kept[key] = load(), torch.get_rng_state()
            self._addresses |= {address(parameter) for parameter in self._kept[key][0].parameters()}
        kept, random_state = self._kept[key]
        torch.set_rng_state(random_state)
        return _copy_over_weights(kept)

    def separate_trained(self, model: nn.Module) -> None:
        """Copies the trained weights of a model, so that they no longer share memory with other models."""
        for parameter in model.parameters():
            if parameter.requires_grad and address(parameter) in self._addresses:
                parameter.data = parameter.data.clone()


def address(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """The place of a tensor's first number; equal for tensors of one device that share memory."""
    return tensor.device, int(tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size())


def shared_base(model: Any, options: Any, load: Callable[[], nn.Module], *, is_frozen: bool) -> nn.Module:
    """The model that `load` makes of `model`, a name or an object, with `options`.

    Inside `BaseModels.in_use` an object is copied, and a model whose weights stay as they are shares them.
    """
    models = _IN_USE.get()
    if models is not None and is_frozen:
        return models.copy_of((model, options), load)
    return copy.deepcopy(load()) if models is not None and isinstance(model, nn.Module) else load()


def separate_trained(model: nn.Module) -> None:
    """Copies the trained weights of a model if they share memory with other models."""
    models = _IN_USE.get()
    if models is not None:
        models.separate_trained(model)


def _copy_over_weights(model: nn.Module) -> nn.Module:
    """A copy of all modules and buffers, whose parameters share the memory of the model's."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        shared = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        vars(shared).update(vars(parameter))
        memo[id(parameter)] = shared
    return copy.deepcopy(model, memo)
