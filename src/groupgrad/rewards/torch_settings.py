"""Restores torch's process-wide settings after reward functions, since the trainer computes with the same ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)


def _set_default_device(device: torch.device) -> None:
    # A default device of its own costs time at each call of torch, which the plain "cpu" need not.
    torch.set_default_device(None if device.type == "cpu" else device)


def _float32_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's older and newer setting differ, as after transformers' `tf32`
        return None


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "whether gradients are computed": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, _set_default_device),
    "the precision of float32 products": (_float32_precision, torch.set_float32_matmul_precision),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
}
"""Settings by name, each with the functions that read and set it; None is read where a setting cannot be told."""

_warned: set[tuple[str, str]] = set()
"""Functions and settings that a warning has named."""


@contextmanager
def torch_settings_kept(function: str) -> Iterator[None]:
    """Context that puts torch's settings back at its end. A warning names what `function` has changed, once."""
    before = {name: get() for name, (get, _) in _SETTINGS.items()}
    try:
        yield
    finally:
        for name, (get, put_back) in _SETTINGS.items():
            if before[name] is None or (now := get()) == before[name]:
                continue
            put_back(before[name])
            if (function, name) not in _warned:
                _warned.add((function, name))
                logger.warning(
                    "the reward function %r has set %s of torch to %s, and training needs %s as before: it was put "
                    "back, as after each call. Use torch's context managers, such as torch.no_grad(). Said once",
                    function,
                    name,
                    now,
                    before[name],
                )
