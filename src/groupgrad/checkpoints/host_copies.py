"""Defers writing the large files of a checkpoint: their tensors are copied to host memory and written later."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

LARGE_BYTES = 2**20
"""Minimum bytes of a file's tensors for it to be held back; smaller files are written at once."""

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
    """Context in which large tensors saved below `folder` are copied instead of written.

    Yields a list to which a function is added for each such file; calling it writes the file. A file is written at once
    if memory does not suffice for a copy of its tensors.
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
    """Context in which the functions that write tensors (`_WRITERS`) are replaced for paths below `folder`.

    A call `write(tensors, path, ...)` becomes `replacement(write, tensors, path, ...)`.
    """

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
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def on_host(value: Any) -> Any:
    """A deep copy whose tensors are on the CPU; tensors that share memory on the CPU share it in the copy."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    memo: dict[int, Any] = {id(tensor): tensor.detach().cpu() for tensor in tensors if tensor.device.type != "cpu"}
    with torch.no_grad():
        return copy.deepcopy(value, memo)
