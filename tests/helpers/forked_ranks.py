"""Runs a function on ranks that are forked from this process, so that nothing is imported again.

`run_on` starts a script by torch's launcher instead: for what reads the launcher's environment as it is imported.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from made_once import made_once
from waiting import free_port

_LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


class ForkedRanks:
    """Ranks that are under way; their output is in `rank_0.log`, `rank_1.log` and so on of the folder."""

    def __init__(self, action: Callable[[int], object], folder: Path, num_ranks: int = 2):
        self._folder, self._num_ranks = folder, num_ranks
        self.codes: dict[int, int] = {}
        port = free_port()
        self.pids = [self._fork(action, rank, port) for rank in range(num_ranks)]

    def _fork(self, action: Callable[[int], object], rank: int, port: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            _become_rank(rank, port, self._num_ranks)
            with (self._folder / f"rank_{rank}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
                faulthandler.enable(sys.stderr)
                logging.basicConfig(stream=sys.stderr, force=True, format="%(message)s")
                try:
                    action(rank)
                    code = 0
                except SystemExit as stopped:
                    code = int(stopped.code or 0)
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            os._exit(code)

    def log(self, rank: int) -> str:
        """The output of a rank."""
        return (self._folder / f"rank_{rank}.log").read_text()

    def kill(self, rank: int, name: str = "SIGKILL") -> None:
        """Sends a signal to a rank that has not ended."""
        if self.wait(0.0)[rank] is None:
            os.kill(self.pids[rank], getattr(signal, name))

    def wait(self, seconds: float) -> list[int | None]:
        """Exit codes of the ranks, negative for signals; None for one that has not ended."""
        end = time.monotonic() + seconds
        while True:
            for rank in set(range(self._num_ranks)) - set(self.codes):
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
            if len(self.codes) == self._num_ranks or time.monotonic() >= end:
                return [self.codes.get(rank) for rank in range(self._num_ranks)]
            time.sleep(0.01)


def _become_rank(rank: int, port: int, num_ranks: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def forked_ranks(action: Callable[[int], object], folder: Path, num_ranks: int = 2) -> Iterator[ForkedRanks]:
    """`action(rank)` on the ranks, which are killed at the end of the body if they have not ended."""
    ranks = ForkedRanks(action, folder, num_ranks)
    try:
        yield ranks
    finally:
        for rank in range(num_ranks):
            ranks.kill(rank)
        ranks.wait(10.0)


def on_ranks(
    action: Callable[[int], Any], folder: Path, num_ranks: int, *, timeout_s: float = 120.0, connect: bool = True
) -> list[Any]:
    """The results of `action(rank)` on each rank; AssertionError with the output of a rank that fails.

    With `connect` the ranks are a gloo process group before the action begins.
    """

    def act(rank: int) -> None:
        torch.set_num_threads(1)
        if connect:
            torch.distributed.init_process_group("gloo")
        torch.save(action(rank), folder / f"result_{rank}.pt")

    with forked_ranks(act, folder, num_ranks) as ranks:
        codes, end = ranks.wait(0.0), time.monotonic() + timeout_s
        while None in codes and not any(codes) and time.monotonic() < end:
            codes = ranks.wait(0.1)
        codes = ranks.wait(2.0 if any(codes) else 0.0)  # the others of one that has failed
        failed = [rank for rank in range(num_ranks) if codes[rank] != 0]
        assert not failed, "\n".join(f"rank {rank} ({codes[rank]}): {ranks.log(rank)[-3000:]}" for rank in failed)
    return results_of(folder, num_ranks)


def results_of(folder: Path, num_ranks: int) -> list[Any]:
    """Reads what each rank wrote to `result_<rank>.pt`."""
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def two_once(
    factory: pytest.TempPathFactory, name: str, action: Callable[[Path], Any], *, connect: bool = False
) -> tuple[Path, list[Any]]:
    """The results of `action(folder)` on two ranks, made once for all of pytest-xdist's workers, with the folder."""

    def make(out: Path) -> None:
        on_ranks(lambda rank: action(out), out, 2, timeout_s=500.0, connect=connect)

    folder = made_once(factory, name, make)
    return folder, results_of(folder, 2)


def wait_for(path: Path, seconds: float = 60.0) -> None:
    """Waits until a file is there."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def run_on(num_ranks: int, script: Path, *arguments: object, timeout_s: float, **environment: str) -> None:
    """Has torch's launcher run `script` on CPU ranks; AssertionError with their output if one of them fails.

    `environment` overrides variables of this process.
    """
    process = subprocess.Popen(
        [sys.executable, *_LAUNCHER, str(num_ranks), str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, output = process.communicate(timeout=timeout_s)
    except BaseException:
        # SIGTERM makes the launcher end its ranks; SIGKILL would leave them running.
        process.terminate()
        process.communicate()
        raise
    assert process.returncode == 0, output[-6000:]


class FakeGroup:
    """A group of which this process plays one rank."""

    def __init__(self, index: int, size: int):
        self.index, self.size = index, size
