"""Waits for extensions that another process compiles, or was compiling when it was killed."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from groupgrad import GRPOConfig
from groupgrad.kernels import extension_lock


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock beside a source; waits are bounded."""
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # restored afterwards
    monkeypatch.setattr(extension_lock, "POLL_S", 0.02)
    extension_lock.bound_waits()
    (tmp_path / "source.cpp").touch()
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


def test_an_old_lock_is_an_error_that_names_it(lock: Path) -> None:
    old = time.time() - extension_lock.LEFT_S
    os.utime(lock, (old, old))
    with pytest.raises(RuntimeError, match=rf"the file {re.escape(str(lock))} says .* delete the file"):
        cpp_extension.load("something", [str(lock.parent / "source.cpp")], build_directory=str(lock.parent))
    assert lock.exists(), "it may be another machine's"


def test_a_lock_is_waited_for_and_named(lock: Path, caplog: Any) -> None:
    waiting = threading.Thread(target=FileBaton(str(lock)).wait, daemon=True)
    with caplog.at_level(logging.WARNING):
        waiting.start()
        waiting.join(0.2)
    assert waiting.is_alive() and str(lock) in caplog.text
    lock.unlink()
    waiting.join(5.0)
    assert not waiting.is_alive()


def test_a_configuration_with_deepspeed_bounds_the_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unbounded(baton: FileBaton) -> None:
        raise AssertionError("torch's own, which has no end")

    monkeypatch.setattr(FileBaton, "wait", unbounded)
    GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert FileBaton.wait is unbounded
    with suppress(ImportError):  # DeepSpeed may not be installed
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, deepspeed={"zero_optimization": {"stage": 2}})
    assert FileBaton.wait is extension_lock._wait
