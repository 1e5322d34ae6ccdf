"""Holds back the large files of a checkpoint while they are saved: as copies in host memory, written later."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

LARGE_BYTES = 2**20
"""Tensors of a file from which on it is held back; smaller files are written at once."""

_WRITERS = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
)
"""Functions `f(tensors, path, ...)` by which transformers, PEFT and this package write tensors."""

Write = Callable[[], None]


@contextmanager
def held_back(folder: Path) -> Iterator[list[Write]]:
    """Context in which large tensors saved below `folder` are copied in place of written.

    Yields a list that gets one function for each file, which writes it as it would have been written. A file for whose
    copy memory does not suffice is written at once.
    """
    waiting: list[Write] = []

    def hold(write: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if num_bytes(tensors) >= LARGE_BYTES:
            try:
                waiting.append(partial(write, on_host(tensors), *args, **kwargs))
                return
            except (MemoryError, RuntimeError):
                pass
        write(tensors, *args, **kwargs)

    with replaced_writers(folder, hold):
        yield waiting


@contextmanager
def replaced_writers(folder: Path, replacement: Callable[..., None]) -> Iterator[None]:
    """Context in which `replacement(write, tensors, path, ...)` takes the place of `write(tensors, path, ...)` for
    each of the functions that write tensors, where the path is below `folder`."""

    def replaced(write: Callable[..., None], tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(folder):
            replacement(write, tensors, path, *args, **kwargs)
        else:
            write(tensors, path, *args, **kwargs)

    with ExitStack() as stack:
        for module_name, name in _WRITERS:
            try:
                module = importlib.import_module(module_name)
            except ImportError:
                continue
            write = getattr(module, name, None)
            if write is not None:
                stack.callback(setattr, module, name, write)
                setattr(module, name, partial(replaced, write))
        yield


def num_bytes(value: Any) -> int:
    """Bytes of the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(num_bytes(item) for item in value.values())
    return sum(num_bytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def on_host(value: Any) -> Any:
    """A deep copy whose tensors are on the CPU; tensors that share memory on the CPU share it in the copy."""
    memo: dict[int, Any] = {}
    _copy_from_devices(value, memo)
    with torch.no_grad():
        return copy.deepcopy(value, memo)


def _copy_from_devices(value: Any, memo: dict[int, Any]) -> None:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" and id(value) not in memo:
            memo[id(value)] = value.detach().cpu()
        return
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        _copy_from_devices(item, memo)
