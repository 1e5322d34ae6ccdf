"""Imports libraries without work that most runs never need: seconds of the start and of the end of each process."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports inside search for no garbage, and bitsandbytes compiles its functions when they are called.

    What a process has imported is also left out of later collections, of which the interpreter runs several at its end,
    unless torch was there before: a model of that time may yet become garbage.
    """
    collects, may_freeze = gc.isenabled(), "torch" not in sys.modules
    finder = _LateCompilation()
    gc.disable()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.end()
        if may_freeze and "torch" in sys.modules:
            gc.freeze()
        if collects:
            gc.enable()


class _LateCompilation:
    """Finds no module, but notices bitsandbytes, whose calls of `torch.compile` would import torch's compiler."""

    def __init__(self) -> None:
        self._compile: Callable[..., Any] | None = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Lets functions of bitsandbytes be compiled on their first call from here on."""
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
