"""Shares the memory of frozen weights and the values of reward functions between arms."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

_PLAIN_TENSORS = (torch.Tensor,)
"""Classes of tensors that are nothing but their numbers; quantized and sharded weights have others."""
MAX_ROWS = 1_000_000
"""Rows whose rewards are kept."""
_PASSED_ANEW = ("trainer_state", "log_extra", "log_metric")
"""Arguments of reward functions that are no part of a row."""


class SharedWeights:
    """Frozen weights of the arms' models, each distinct tensor once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def share(self, model: nn.Module) -> None:
        """Replaces the frozen weights of a model by equal ones that are known on their device.

        Only weights without a gradient are shared, since nothing writes to them, and only those that are equal bit for
        bit.
        """
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.requires_grad or type(tensor.data) not in _PLAIN_TENSORS:
                continue
            kind = name, tensor.device, tuple(tensor.shape), tensor.dtype, tensor.stride()
            same_kind = self._known.setdefault(kind, [])
            kept = next((kept for kept in same_kind if _equal_bits(kept, tensor)), None)
            if kept is None:
                same_kind.append(tensor.data)
            else:
                tensor.data = kept


def _equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))


class RewardCache:
    """Values of reward functions that depend on their row alone, for all arms."""

    def __init__(self) -> None:
        self._values: dict[bytes, Any] = {}

    def cached(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, called only with rows that no arm has had scored. TypeError for one that cannot be cached."""
        parameters = inspect.signature(function).parameters
        used = [argument for argument in _PASSED_ANEW if argument in parameters]
        if used or inspect.iscoroutinefunction(function) or not callable(function):
            what = f"takes {', '.join(used)}" if used else "is asynchronous"
            raise TypeError(f"cache_rewards names {name!r}, which {what}; its values are no function of a row alone")

        @functools.wraps(function)
        def call(**kwargs: Any) -> list[Any]:
            num_rows = len(kwargs["completions"])
            lists = {key: value for key, value in kwargs.items() if isinstance(value, (list, tuple))}
            columns = {key: v for key, v in lists.items() if len(v) == num_rows and key not in _PASSED_ANEW}
            keys = [self._key(name, columns, row) for row in range(num_rows)]
            missing = [row for row, key in enumerate(keys) if key not in self._values]
            found: dict[bytes, Any] = {}
            if missing:
                chosen = {key: [value[row] for row in missing] for key, value in columns.items()}
                scored = function(**{**kwargs, **chosen})
                if len(scored) != len(missing):
                    return scored  # the runner says what is wrong with it
                found = {keys[row]: value for row, value in zip(missing, scored)}
                if len(self._values) + len(found) <= MAX_ROWS:
                    self._values.update(found)
            return [found[key] if key in found else self._values[key] for key in keys]

        return call

    @staticmethod
    def _key(name: str, columns: Mapping[str, Any], row: int) -> bytes:
        content = [(key, columns[key][row]) for key in sorted(columns)]
        return blake2b(pickle.dumps((name, content)), digest_size=16).digest()


def cached_functions(functions: Any, names: Iterable[str], cache: RewardCache) -> list[Any]:
    """Wraps the reward functions in `names` with the cache. ValueError for a name that no function has."""
    items = list(functions) if isinstance(functions, (list, tuple)) else [functions]
    wanted, function_names = set(names), [getattr(function, "__name__", str(function)) for function in items]
    missing = sorted(wanted - set(function_names))
    if missing:
        raise ValueError(
            f"cache_rewards names {missing[0]!r}, which is no reward function; name some of {', '.join(function_names)}"
        )
    return [cache.cached(item, name) if name in wanted else item for item, name in zip(items, function_names)]
