"""Defers writing the large files of a checkpoint: their tensors are copied to host memory and written later."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)

LARGE_BYTES = 2**20
"""Minimum bytes of a file's tensors for it to be held back; smaller files are written at once."""

FRACTION_FOR_COPY = 0.5
"""Fraction of the free memory that the copy of a file's tensors may take; sampling and training need the rest."""

_WRITERS = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
)
"""Functions `f(tensors, path, ...)` by which transformers, PEFT and this package write tensors."""

Write = Callable[[], None]


@contextmanager
def held_back(folder: Path, free_memory: Callable[[], int]) -> Iterator[list[Write]]:
    """Context in which large tensors saved below `folder` are copied instead of written.

    Yields a list to which a function is added for each such file; calling it writes the file. A file is written at once
    if a copy of its tensors would take more than half of `free_memory()` bytes.
    """
    waiting: list[Write] = []

    def hold(write: Callable[..., None], tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        is_below = isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(folder)
        size = num_bytes(tensors) if is_below else 0
        is_short = size > FRACTION_FOR_COPY * free_memory()
        if size >= LARGE_BYTES and not is_short:
            waiting.append(partial(write, on_host(tensors), path, *args, **kwargs))
            return
        if is_short:
            _warn_of_short_memory()
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
                setattr(module, name, partial(hold, write))
        yield waiting


@functools.cache
def _warn_of_short_memory() -> None:
    """Says it once in a process."""
    logger.warning(
        "save_in_background: a copy of a checkpoint's file would take more than half of the free memory, so training "
        "waits for this file to be written"
    )


def num_bytes(value: Any) -> int:
    """Bytes of the tensors in nested dicts, lists and tuples."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def on_host(value: Any) -> Any:
    """A deep copy whose tensors are on the CPU; tensors that share memory on the CPU share it in the copy."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    memo: dict[int, Any] = {id(tensor): tensor.detach().cpu() for tensor in tensors if tensor.device.type != "cpu"}
    with torch.no_grad():
        return copy.deepcopy(value, memo)
