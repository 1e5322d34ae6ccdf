"""Runs Python programs in a sandbox: without network, files, secrets or other processes, and within limits.

The kernel's namespaces keep it apart. `Sandbox` has bubblewrap make them where it is installed, and is refused where
an attempt to break out succeeds. `sandbox_confine` is what runs inside: limits, and the filter of system calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import marshal
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MECHANISMS = ("bubblewrap", "namespaces")
"""Either the program `bwrap` makes the namespaces, or `sandbox_confine` itself does."""
START_TIMEOUT_S = 60.0
START_ATTEMPTS = 3
_FOLDER = "/box"
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/bin")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_PROBE = """
import os, socket

def holds(attempt, *arguments):
    try:
        attempt(*arguments)
    except (OSError, MemoryError):
        return True
    return False

attempts = {
    "a file of the machine can be read": (open, SECRET),
    "a file of the machine can be written": (open, SECRET, "r+"),
    "the folder / can be written": (open, "/groupgrad-probe", "w"),
    "processes of the machine can be listed": (os.listdir, "/proc/1"),
    "the trainer can be signalled": (os.kill, PARENT, 0),
    "the network can be used": (socket.socket,),
    "new processes can be started": (os.fork,),
    "memory has no limit": (bytearray, MEMORY + 1),
}
print("\\n".join(name for name, attempt in attempts.items() if not holds(*attempt)) or "holds")
"""


class SandboxError(RuntimeError):
    """A sandbox does not exist on this machine, or could not be started."""


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox."""

    memory_bytes: int
    """Address space of each process."""
    file_bytes: int
    """All files of the sandbox together; they are in memory, on no disk."""
    max_processes: int
    """Processes and threads together; 1: no process but the first, which may have `MAX_THREADS` threads."""


MAX_THREADS = 32


class Sandbox:
    """A way to run programs of `sandbox_programs` apart from everything else. Can be pickled.

    `python` is the interpreter; its installation and packages are readable inside. `mechanism` is one of `MECHANISMS`
    or "auto", the first that holds. SandboxError if none does, with the reason for each.
    """

    def __init__(self, limits: Limits, python: str | None = None, mechanism: str = "auto"):
        self.limits = limits
        if mechanism not in ("auto", *MECHANISMS):
            raise ValueError(f"mechanism={mechanism!r} is not known; set it to {', '.join(MECHANISMS)} or auto")
        self.mechanism = ""
        """The mechanism in use."""
        self._python, self._readable = _interpreter(python or sys.executable)
        refused = []
        for self.mechanism in MECHANISMS if mechanism == "auto" else (mechanism,):
            reason = self._probe()
            if reason is None:
                return
            refused.append(f"{self.mechanism}: {reason}")
        raise SandboxError(
            f"no sandbox holds on this machine for {self._python} ({'; '.join(refused)}), and code of a model must not "
            "run without one; install bubblewrap, start the container with the right to make namespaces "
            "(docs/code-rewards.md has the options), or name an interpreter that every user can read with python=..."
        )

    @contextlib.asynccontextmanager
    async def run(self, entry: str, *arguments: Any, cpu_s: float, output_bytes: int) -> AsyncIterator[Any]:
        """Starts a program of `sandbox_programs`; gives its `asyncio.subprocess.Process` when it is confined.

        The program has `cpu_s` seconds of CPU for each process. At the end of the block, and when it is cancelled, all
        processes of the sandbox are killed. SandboxError if it cannot start.
        """
        specification = self._specification(entry, arguments, cpu_s)
        process: Any = None
        for attempt in range(START_ATTEMPTS):
            await asyncio.sleep(attempt)
            process = await asyncio.create_subprocess_exec(
                *self._command(),
                **dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE),
                **_APART,
                limit=output_bytes,
            )
            try:
                process.stdin.write(specification)
                if await _is_ready(process):
                    yield process
                    return
            finally:
                await _end(process)
        message = (await process.stderr.read()).decode(errors="replace").strip()
        raise SandboxError(f"a sandbox did not start {START_ATTEMPTS} times ({self.mechanism}): {message}")

    async def run_script(self, code: str, text: str, timeout_s: float, output_bytes: int) -> tuple[bytes, int | None]:
        """Runs code as a script with a text on standard input.

        Returns what it wrote, up to a little more than `output_bytes`, and its exit code, None if it was still running.
        TimeoutError after `timeout_s` seconds.
        """
        async with self.run("run_script", code, cpu_s=timeout_s, output_bytes=output_bytes) as process:
            process.stdin.write(text.encode(errors="replace"))
            process.stdin.write_eof()
            return await asyncio.wait_for(_output_of(process, output_bytes), timeout_s)

    def _probe(self) -> str | None:
        """Tries to break out. None if the sandbox holds, else what is wrong."""
        if not sys.platform.startswith("linux"):
            return f"it needs Linux, and this is {sys.platform}"
        if self.mechanism == "bubblewrap" and shutil.which("bwrap") is None:
            return "it is not installed"
        with tempfile.NamedTemporaryFile() as secret:
            os.chmod(secret.name, 0o666)
            names = f"SECRET, PARENT, MEMORY = {secret.name!r}, {os.getpid()}, {self.limits.memory_bytes}"
            try:
                ended = subprocess.run(
                    self._command(),
                    input=self._specification("run_script", (names + _PROBE,), START_TIMEOUT_S, single_process=True),
                    capture_output=True,
                    timeout=START_TIMEOUT_S,
                    check=False,
                    **_APART,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"{type(error).__name__}: {error}"
        found = ended.stdout.decode(errors="replace").splitlines()
        if found == ["ready", "holds"]:
            return None
        if found[:1] == ["ready"]:
            return ", ".join(found[1:]) or f"{self._python} cannot be read by the user that runs code"
        return ended.stderr.decode(errors="replace").strip()[-300:] or f"it ended with code {ended.returncode}"

    def _specification(
        self, entry: str, arguments: tuple[Any, ...], cpu_s: float, single_process: bool | None = None
    ) -> bytes:
        limits = self.limits
        if single_process is None:
            single_process = limits.max_processes == 1
        text = marshal.dumps(
            {
                "mechanism": self.mechanism,
                "parent": os.getpid(),
                "uid": _spare_user() if os.getuid() == 0 else None,
                "folder": _FOLDER,
                "folder_bytes": limits.file_bytes,
                "readable": self._paths(),
                "single_process": single_process,
                "limits": {
                    "RLIMIT_CPU": int(cpu_s) + 1,
                    "RLIMIT_AS": limits.memory_bytes,
                    "RLIMIT_FSIZE": limits.file_bytes,
                    "RLIMIT_NPROC": MAX_THREADS if single_process else limits.max_processes,
                    "RLIMIT_NOFILE": 64,
                    **dict.fromkeys(("RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE", "RLIMIT_SIGPENDING"), 0),
                },
                "program": _source("sandbox_programs"),
                "entry": entry,
                "arguments": arguments,
            },
            2,  # a version that every interpreter reads; its modules for text take longer to load than all else
        )
        return b"%012d" % len(text) + text

    def _paths(self) -> list[str]:
        """Returns the paths that the sandbox shows beside the folder of the code, folders before their contents."""
        return sorted(filter(os.path.exists, {*_SYSTEM, *_SYSTEM_FILES, *_DEVICES, *self._readable}))

    def _command(self) -> list[str]:
        program = [self._python, "-s", "-c", _source("sandbox_confine")]
        if self.mechanism != "bubblewrap":
            return program
        capabilities = ["CAP_SYS_ADMIN", *(("CAP_SETUID", "CAP_SETGID") if os.getuid() == 0 else ())]
        command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--unshare-pid", "--unshare-net"]
        command += ["--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        command += [] if os.getuid() == 0 else ["--unshare-user"]
        paths = self._paths()
        for folder in sorted({str(folder) for path in paths for folder in Path(path).parents} - {"/"}):
            command += ["--dir", folder]  # else only root may pass through it
        for path in paths:
            command += ["--dev-bind" if path in _DEVICES else "--ro-bind", path, path]
        command += ["--dir", _FOLDER, "--remount-ro", "/", "--chdir", "/"]
        for capability in capabilities:
            command += ["--cap-add", capability]  # given up before the program starts
        return [*command, "--", *program]


_APART: dict[str, Any] = {"env": _ENVIRONMENT, "cwd": "/", "start_new_session": True, "close_fds": True}


async def _is_ready(process: Any) -> bool:
    try:
        return await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S) == b"ready\n"
    except (asyncio.TimeoutError, ValueError):
        return False


async def _output_of(process: Any, output_bytes: int) -> tuple[bytes, int | None]:
    """The output of a process and its exit code, as soon as it has ended or has written too much."""
    output = bytearray()
    while part := await process.stdout.read(1 << 16):
        output += part
        if len(output) > output_bytes:
            return bytes(output), None
    return bytes(output), await process.wait()


async def _end(process: Any) -> None:
    """Kills a sandbox and waits for its end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            # Ends bubblewrap, with which the kernel ends the sandbox; `sandbox_confine` does the same. The method
            # `send_signal` of the process would take its exit code away from the event loop.
            os.kill(process.pid, signal.SIGTERM)
    process.stdin.close()
    while await process.stdout.read(1 << 16):  # ends with the last process that holds the other end
        pass
    await process.wait()
    with contextlib.suppress(ConnectionError):  # code that ends before it has read its input
        await process.stdin.wait_closed()


def _spare_user() -> int:
    """Returns an unused user id: the kernel counts processes by user, and a user may signal its own processes."""
    first, _, count = map(int, Path("/proc/self/uid_map").read_text().splitlines()[-1].split())
    last = first + count - 1
    return random.SystemRandom().randrange(1 << 30, 1 << 31) if last >= 1 << 31 else max(1, last - os.getpid() % 16384)


@functools.cache
def _source(module: str) -> str:
    return Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")


@functools.cache
def _interpreter(python: str) -> tuple[str, tuple[str, ...]]:
    """The path of an interpreter, and the folders that it needs. SandboxError if it does not run."""
    question = "import sys; print(sys.executable, sys.prefix, sys.base_prefix, *sys.version_info[:2], sep='\\n')"
    try:
        answer = subprocess.run(
            [python, "-s", "-c", question], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
        executable, prefix, base_prefix, major, minor = answer.stdout.split("\n")[:5]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"python={python!r} does not run ({error}); name an interpreter of Python 3.10+") from error
    if (int(major), int(minor)) < (3, 10):
        raise SandboxError(f"python={python!r} is Python {major}.{minor}; name an interpreter of Python 3.10 or newer")
    folders = {prefix, base_prefix, os.path.realpath(prefix), os.path.realpath(base_prefix)}
    path = executable
    while os.path.islink(path):
        path = os.path.join(os.path.dirname(path), os.readlink(path))
        folders.add(os.path.dirname(os.path.dirname(os.path.normpath(path))))
    return executable, tuple(sorted(folders - {"/", ""}))
