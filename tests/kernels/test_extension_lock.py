"""Waits for extensions that another process compiles, or was compiling when it was killed."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from groupgrad import GRPOConfig
from groupgrad.activity import Hung
from groupgrad.kernels import extension_lock
from groupgrad.trainer.hangs import Watch

HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT); print('open', flush=True); time.sleep(60)"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock beside a source; waits are bounded, and short."""
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # restored afterwards
    for name, seconds in {"POLL_S": 0.02, "NOTE_S": 0.1, "LEFT_S": 0.3}.items():
        monkeypatch.setattr(extension_lock, name, seconds)
    extension_lock.bound_waits()
    (tmp_path / "source.cpp").touch()
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


def load(lock: Path) -> list[BaseException]:
    """Load an extension as DeepSpeed does, in a thread; returns the error that it ended with within ten seconds."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            cpp_extension.load("something", [str(lock.parent / "source.cpp")], build_directory=str(lock.parent))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10.0)
    return errors


def test_a_lock_that_no_process_holds_is_an_error_that_names_it(lock: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        (error,) = load(lock)
    assert isinstance(error, RuntimeError)
    story = rf"the file {re.escape(str(lock))} says .* no process of this machine has had it open .* delete the file"
    assert re.search(story, str(error))
    assert f"{lock}, no process has it open" in caplog.text and lock.exists(), "it may be another machine's"


def test_a_lock_that_a_process_holds_is_waited_for_and_the_process_named(lock: Path, caplog: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        waiting = threading.Thread(target=FileBaton(str(lock)).wait, daemon=True)
        with caplog.at_level(logging.WARNING):
            waiting.start()
            waiting.join(1.0)
        assert waiting.is_alive() and f"{lock}, process {holder.pid} compiles it" in caplog.text
        lock.unlink()
        waiting.join(5.0)
        holder.kill()
    assert not waiting.is_alive()


def test_the_watchdog_names_the_lock_that_is_waited_for(lock: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        try:
            with Watch("the training loop", tmp_path, lambda: 0, 2.0), pytest.raises(Hung) as error:
                FileBaton(str(lock)).wait()
        finally:
            holder.kill()
    story = rf"waiting for an extension of torch has run .*{re.escape(str(lock))}, process {holder.pid} compiles it"
    assert re.search(story, str(error.value))


def test_a_configuration_with_deepspeed_bounds_the_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unbounded(baton: FileBaton) -> None:
        raise AssertionError("torch's own, which has no end")

    monkeypatch.setattr(FileBaton, "wait", unbounded)
    GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert FileBaton.wait is unbounded
    with suppress(ImportError):  # DeepSpeed may not be installed
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, deepspeed={"zero_optimization": {"stage": 2}})
    assert FileBaton.wait is extension_lock._wait
