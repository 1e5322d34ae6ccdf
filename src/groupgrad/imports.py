"""Imports libraries without work that most runs never need, which saves seconds at the start and end of a process."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_KERNEL_LOGGER = "bitsandbytes.backends.cpu.ops"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports inside search for no garbage, and bitsandbytes compiles its functions when they are called.

    peft imports bitsandbytes where it is installed, which then warns that a kernel for inference in 4 bits is missing.
    That warning is dropped: nothing may be quantized, and no model that trains runs the kernel
    (`models/quantized.py`).

    What a process has imported is also left out of later collections, of which the interpreter runs several at its end,
    unless torch was there before: a model of that time may yet become garbage.
    """
    collects, may_freeze = gc.isenabled(), "torch" not in sys.modules
    finder = _LateCompilation()
    gc.disable()
    sys.meta_path.insert(0, finder)
    of_kernels, is_of_use = logging.getLogger(_KERNEL_LOGGER), functools.partial(_is_of_use)
    of_kernels.addFilter(is_of_use)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.end()
        of_kernels.removeFilter(is_of_use)
        if may_freeze and "torch" in sys.modules:
            gc.freeze()
            if "triton" in sys.modules:
                # From 3.8 on it prints a list of objects that are still there when the interpreter has ended.
                atexit.register(gc.unfreeze)
        if collects:
            gc.enable()


def _is_of_use(record: logging.LogRecord) -> bool:
    """False for the warning that a kernel of bitsandbytes is missing."""
    return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")


class _LateCompilation:
    """Finds no module, but notices bitsandbytes, whose calls of `torch.compile` would import torch's compiler."""

    def __init__(self) -> None:
        self._compile: Callable[..., Any] | None = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Defers compilations from the import of bitsandbytes on: its functions are compiled on their first call."""
        if name != "bitsandbytes" or self._compile is not None:
            return
        import torch

        self._compile = torch.compile
        torch.compile = functools.partial(_compile_late, torch.compile)

    def end(self) -> None:
        """Puts `torch.compile` back."""
        if self._compile is not None:
            import torch

            torch.compile = self._compile


def _compile_late(compile: Callable[..., Any], model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`torch.compile` of a function of bitsandbytes on its first call, of anything else at once."""
    if model is None:
        return functools.partial(_compile_late, compile, **options)
    if not getattr(model, "__module__", "").startswith("bitsandbytes."):
        return compile(model, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compile(model, **options)

    @functools.wraps(model)
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled()(*arguments, **named)

    return call
