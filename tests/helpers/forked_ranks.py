"""Runs a function on two ranks that are forked from this process, so that nothing is imported again."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class ForkedRanks:
    """Two ranks that are under way; their output is in `rank_0.log` and `rank_1.log` of the folder."""

    def __init__(self, action: Callable[[int], object], folder: Path):
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.codes: dict[int, int] = {}
        self.pids = [self._fork(action, rank, port) for rank in range(2)]

    def _fork(self, action: Callable[[int], object], rank: int, port: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            _become_rank(rank, port)
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
        """What a rank has printed."""
        return (self._folder / f"rank_{rank}.log").read_text()

    def kill(self, rank: int, name: str = "SIGKILL") -> None:
        """Sends a signal to a rank that has not ended."""
        if self.wait(0.0)[rank] is None:
            os.kill(self.pids[rank], getattr(signal, name))

    def wait(self, seconds: float) -> list[int | None]:
        """Exit codes of the ranks, negative for signals; None for one that has not ended."""
        end = time.monotonic() + seconds
        while True:
            for rank in {0, 1} - set(self.codes):
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
            if len(self.codes) == 2 or time.monotonic() >= end:
                return [self.codes.get(rank) for rank in range(2)]
            time.sleep(0.01)


def _become_rank(rank: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def forked_ranks(action: Callable[[int], object], folder: Path) -> Iterator[ForkedRanks]:
    """`action(rank)` on two ranks, which are killed at the end of the body if they have not ended."""
    ranks = ForkedRanks(action, folder)
    try:
        yield ranks
    finally:
        for rank in range(2):
            ranks.kill(rank)
        ranks.wait(10.0)


def wait_for(path: Path, seconds: float = 60.0) -> None:
    """Waits until a file is there."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
