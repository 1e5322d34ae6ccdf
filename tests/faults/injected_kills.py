"""Kills a process at a chosen write, sync, rename or removal below a folder."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import modeling_utils

_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def run_and_kill(action: Callable[[], Any], folder: Path, *, at: int = 0, max_file_bytes: int = 0) -> tuple[int, int]:
    """Runs `action` in a copy of this process. Returns the wait status and the number of changes that it saw.

    The copy is killed just before change number `at` below `folder` (1 is the first, 0 never), or by a write that
    makes a file longer than `max_file_bytes` (0: no limit).
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            seen = pipe.read()
        return os.waitpid(process, 0)[1], len(seen)
    try:
        os.close(reader)
        if max_file_bytes:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        count_changes(folder, at, writer)
        action()
        os._exit(0)
    except BaseException as error:  # a copy of the test process must not go on
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(1)


def count_changes(folder: Path, at: int, writer: int) -> None:
    """Writes a byte to `writer` at each change below `folder`, and kills this process just before number `at`."""
    seen = 0

    def change(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(writer, b".")

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and not arguments[2] & _WRITING:
            return
        if event in _CHANGES or event == "open":
            path = arguments[0]
            # Removals name files relative to an open folder, so a relative path counts too.
            if isinstance(path, (str, os.PathLike)) and (
                not os.path.isabs(path) or os.fspath(path).startswith(str(folder))
            ):
                change()

    sys.addaudithook(watch)
    for module, name in (
        (os, "fsync"),
        (torch, "save"),
        (modeling_utils, "safe_save_file"),
        (safetensors.torch, "save_file"),
    ):
        setattr(module, name, _between(getattr(module, name), change))


def _between(function: Callable[..., Any], change: Callable[[], None]) -> Callable[..., Any]:
    """Returns `function`, wrapped so that `change` is called before and after it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        change()
        result = function(*args, **kwargs)
        change()
        return result

    return wrapped
