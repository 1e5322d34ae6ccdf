"""Attempts to break out of the sandbox of `code_reward`: `python tests/helpers/sandbox_escapes.py`.

The machine has bait: a secret in the environment, in a file and in an open file, servers, and signal handlers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_escape_scripts import FORGED, FOUND, KILLED, MANY_PROCESSES, ONE_PROCESS, PRELUDE, TESTS

from groupgrad.integrations.code_sandbox.sandbox import Limits, Sandbox, SandboxError
from groupgrad.rewards import code_reward

SECRET = "swordfish-" + str(os.getpid())
MARK = f"esc{os.getpid()}"[:15]
"""Name of processes that a script starts, to find those that outlive it."""


def holding(mechanism: str) -> str:
    """An interpreter with which the mechanism holds; skips the test where there is none."""
    import pytest

    reason = ""
    # The interpreter of a virtual environment may lie where other users than root cannot read.
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            Sandbox(Limits(1 << 28, 1 << 22, 1), python, mechanism)
        except SandboxError as error:
            reason = str(error)
        else:
            return python
    raise pytest.skip.Exception(reason)


@dataclass
class Tries:
    """Result of all attempts with one mechanism."""

    mechanism: str
    count: int = 0
    escaped: list[str] = field(default_factory=list)
    """Attempts that succeeded, or could not be made."""


class Bait:
    """A machine with secrets, servers and signal handlers; `touched` says what was reached."""

    def __init__(self, folder: str):
        self.folder, self.touched = folder, []
        Path(folder, "secret").write_text(SECRET)
        Path(folder, "empty").mkdir(exist_ok=True)
        os.chmod(folder, 0o777)
        os.chmod(folder + "/secret", 0o666)
        self._before = self._state()
        self._servers: list[socket.socket] = []
        self.tcp = self._serve(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))[1]
        self.udp = self._serve(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))[1]
        self._serve(socket.AF_UNIX, socket.SOCK_STREAM, folder + "/socket")
        self._serve(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + MARK)
        os.chmod(folder + "/socket", 0o777)

    def _serve(self, family: int, kind: int, address: Any) -> Any:
        server = socket.socket(family, kind)
        server.bind(address)
        if kind == socket.SOCK_STREAM:
            server.listen()
        server.setblocking(False)
        self._servers.append(server)
        return server.getsockname()

    def _state(self) -> Any:
        seen = os.stat(self.folder + "/secret")
        names = sorted(set(os.listdir(self.folder)) - {"socket"})
        return names, seen.st_mode, seen.st_mtime_ns, seen.st_size, os.listxattr(self.folder + "/secret")

    def check(self) -> list[str]:
        """The servers and files that the code has reached since the start."""
        for server in self._servers:
            with contextlib.suppress(BlockingIOError):
                server.recv(10) if server.type == socket.SOCK_DGRAM else server.accept()
                self.touched.append(f"server {server.getsockname()}")
        if self._state() != self._before:
            self.touched.append(f"files outside: {self._state()}")
        if survivors := self._survivors():
            self.touched.append(f"processes that survive: {survivors}")
        return self.touched

    def _survivors(self) -> list[int]:
        deadline = time.monotonic() + 3
        while True:
            found = []
            for process in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{process}/comm").read_text().strip() == MARK:
                        found.append(int(process))
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def close(self) -> None:
        for server in self._servers:
            server.close()


@contextlib.contextmanager
def bait() -> Iterator[Bait]:
    """Lays out secrets, and catches signals if this is the main thread."""
    on_main = threading.current_thread() is threading.main_thread()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        trap = Bait(folder)
        os.environ["GROUPGRAD_SECRET"] = SECRET
        handle = os.open(folder + "/secret", os.O_RDWR)
        os.set_inheritable(handle, True)
        numbers = (signal.SIGURG, signal.SIGIO) if on_main else ()
        before = {n: signal.signal(n, lambda number, _: trap.touched.append(f"signal {number}")) for n in numbers}
        try:
            yield trap
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(handle)
            del os.environ["GROUPGRAD_SECRET"]
            trap.close()


def try_all(mechanism: str = "auto", python: str | None = None, *, quick: bool = False) -> Tries:
    """Tries every escape with one mechanism; `quick`: those that no deadline has to end, in few sandboxes."""
    options: dict[str, Any] = {"mechanism": mechanism, "python": python, "extract": "all", "max_concurrency": 4}
    options |= {"folder_mb": 4, "output_kb": 256, "timeout_s": 5}
    reward = code_reward(**options, memory_mb=256)
    mechanism = options["mechanism"] = reward.mechanism
    # One at a time: as a user without namespaces, the limit is that of all processes of the user.
    # On a busy machine, filling the memory of 16 processes takes long.
    many = code_reward(**options | {"max_concurrency": 1, "timeout_s": 30}, memory_mb=128, max_processes=16)
    killed = code_reward(**options | {"timeout_s": 1}, memory_mb=256)
    names = f"MARK, SECRET, PARENT = {MARK!r}, {SECRET!r}, {os.getpid()}\n"
    tries = Tries(mechanism)
    with bait() as trap:
        names += f"FOLDER, TCP, UDP = {trap.folder!r}, {trap.tcp}, {trap.udp}\n" + PRELUDE
        wanted = [["input\n", "held\n"]]
        one_process = {"all of one process": "\n".join(ONE_PROCESS.values())} if quick else ONE_PROCESS
        for scripts, call, tests, share in (
            (one_process, reward, wanted, 1.0),
            (MANY_PROCESSES, many, wanted, 1.0),
            (KILLED, killed, [["", "held"]], 0.0),
            (FOUND, killed, [["input\n", f"expected-{os.getpid()}"]], 0.0),
            (FORGED, killed, TESTS, 0.0),
        )[: 2 if quick else None]:
            sources = list(scripts.values())
            if scripts is not FORGED:
                sources = [names + source + ("\nprint('held')\n" if share else "") for source in sources]
            shown: dict[str, list[Any]] = {}
            rewards = asyncio.run(
                call(
                    prompts=sources,
                    completions=sources,
                    tests=[tests] * len(sources),
                    log_extra=shown.__setitem__,
                )
            )
            tries.count += len(sources)
            for name, got, why in zip(scripts, rewards, shown["code_failure"]):
                if got != share:
                    tries.escaped.append(f"{name}: {why}")
        tries.escaped += trap.check()
    return tries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mechanism", default="auto")
    parser.add_argument("--python")
    arguments = parser.parse_args()
    started = time.monotonic()
    tries = try_all(arguments.mechanism, arguments.python)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(*tries.escaped, sep="\n", end="\n" if tries.escaped else "")
    print(
        f"{tries.mechanism}, uid {os.getuid()}: {tries.count} escapes tried, {len(tries.escaped)} escaped, "
        f"{time.monotonic() - started:.1f} s, largest process {peak} MiB"
    )
    return bool(tries.escaped)


if __name__ == "__main__":
    sys.exit(main())
