"""Waits for extensions that another process compiles, or was compiling when it was killed."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from groupgrad import GRPOConfig, activity
from groupgrad.activity import Hung
from groupgrad.kernels import extension_lock
from groupgrad.trainer.hangs import Watch

HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT); print('open', flush=True); time.sleep(60)"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock that was taken ten minutes ago, beside a source; waits are bounded, and short."""
    for name in ("wait", "try_acquire", "release"):
        monkeypatch.setattr(FileBaton, name, getattr(FileBaton, name))  # restored afterwards
    for name, seconds in {"POLL_S": 0.02, "NOTE_S": 0.1, "CONFIRM_S": 0.3}.items():
        monkeypatch.setattr(extension_lock, name, seconds)
    extension_lock.bound_waits()
    (tmp_path / "source.cpp").touch()
    (tmp_path / "lock").touch()
    then = time.time() - 600.0
    for path in tmp_path.iterdir():
        os.utime(path, (then, then))
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
    story = rf"the file {re.escape(str(lock))} says .* no process of this machine has it open, .* 60\d s: .* delete the"
    assert re.search(story, str(error))
    assert "this process waits for an extension" in caplog.text and lock.exists(), "it may be another machine's"


def test_a_lock_in_a_folder_that_still_changes_is_waited_for(lock: Path) -> None:
    """The compiling process may run on another machine, where this one cannot see it."""
    (lock.parent / "object.o").touch()
    waiting = threading.Thread(target=FileBaton(str(lock)).wait, daemon=True)
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive()
    lock.unlink()
    waiting.join(5.0)
    assert not waiting.is_alive()


def test_a_lock_that_a_process_holds_is_waited_for_and_the_process_named(lock: Path, caplog: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        waiting = threading.Thread(target=FileBaton(str(lock)).wait, daemon=True)
        with caplog.at_level(logging.WARNING):
            waiting.start()
            waiting.join(1.0)
        assert waiting.is_alive() and f"process {holder.pid} compiles an extension" in caplog.text
        lock.unlink()
        waiting.join(5.0)
        holder.kill()
    assert not waiting.is_alive()


BURN = "import time; end = time.time() + {s}\nwhile time.time() < end: pass"
COMPILE = """
import os, subprocess, sys
os.open(sys.argv[1], os.O_CREAT)
print("open", flush=True)
subprocess.run([sys.executable, "-c", sys.argv[2]])
os.unlink(sys.argv[1])
"""
IDLE = "import time; time.sleep(30)"


@contextmanager
def compiling(lock: Path, work: str) -> Iterator[int]:
    """Id of a process that has the lock and a child that does this work, as a compiler would."""
    command = [sys.executable, "-c", COMPILE, str(lock), work]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
            yield holder.pid
        finally:
            with suppress(ProcessLookupError):
                os.killpg(holder.pid, signal.SIGKILL)


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    with Watch(folder, lambda: 0, 2.0), activity.doing("the training loop"):
        yield


def test_the_watchdog_waits_for_a_compiler_that_computes(lock: Path, tmp_path: Path) -> None:
    with compiling(lock, BURN.format(s=3.5)), watched(tmp_path):
        FileBaton(str(lock)).wait()
    assert not lock.exists()


def test_the_watchdog_names_the_lock_of_a_compiler_that_hangs(lock: Path, tmp_path: Path) -> None:
    with compiling(lock, IDLE) as holder, watched(tmp_path), pytest.raises(Hung) as error:
        FileBaton(str(lock)).wait()
    story = rf"waiting for an extension of torch has run .*{re.escape(str(lock))}, process {holder} compiles it"
    assert re.search(story, str(error.value))


@pytest.mark.parametrize(("work", "is_hung"), [(BURN.format(s=3.5), False), (IDLE, True)])
def test_the_watchdog_waits_for_compilers_of_this_process(lock: Path, tmp_path: Path, work: str, is_hung: bool) -> None:
    lock.unlink()
    baton = FileBaton(str(lock))
    with watched(tmp_path):
        assert baton.try_acquire() and not FileBaton(str(lock)).try_acquire()
        expected = pytest.raises(Hung, match="compiling an extension of torch has run") if is_hung else nullcontext()
        try:
            with expected:
                subprocess.run([sys.executable, "-c", work], check=True)
        finally:
            baton.release()
    assert not lock.exists() and activity.present()[0] is None


def test_a_configuration_with_deepspeed_bounds_the_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unbounded(baton: FileBaton) -> None:
        raise AssertionError("torch's own, which has no end")

    monkeypatch.setattr(FileBaton, "wait", unbounded)
    GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert FileBaton.wait is unbounded
    with suppress(ImportError):  # DeepSpeed may not be installed
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, deepspeed={"zero_optimization": {"stage": 2}})
    assert FileBaton.wait is extension_lock._wait
