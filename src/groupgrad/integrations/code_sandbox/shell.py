"""A shell in a sandbox, for agents that work on a folder of files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import NamedTuple

from groupgrad.integrations.code_sandbox.sandbox import Limits, Sandbox

_SCRIPT = """
import json, os, pathlib, subprocess, sys
given = json.loads(sys.stdin.read())
for name, text in given["files"].items():
    path = pathlib.Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
path = os.defpath + ":/usr/local/bin"
done = subprocess.run(
    ["/bin/sh", "-c", given["command"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    env={"PATH": path, "HOME": os.getcwd()},
)
files = {}
for path in sorted(pathlib.Path(".").rglob("*")):
    if path.is_file() and "__pycache__" not in path.parts:
        files[str(path)] = path.read_text(errors="replace")
print(json.dumps({"status": done.returncode, "output": done.stdout.decode(errors="replace"), "files": files}))
"""


class Done(NamedTuple):
    """The result of a command."""

    status: int
    """Exit status; 124 if it did not end in time, 125 if it wrote or left behind more than it may."""
    output: str
    """Its standard output and errors, in the order in which they were written."""


class SandboxedShell:
    """Runs commands on a folder of text files, apart from everything else (`Sandbox`).

    Each command has a sandbox of its own, into which `files` are written and out of which they are read, so that
    nothing else survives a command: no process, no variable, no folder that is changed to. SandboxError if no sandbox
    holds on this machine.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        *,
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        folder_mb: int = 16,
        output_kb: int = 1024,
        max_processes: int = 16,
    ):
        self.files = dict(files)
        """Texts by relative path, as the last command left them."""
        self._timeout_s, self._output_bytes = timeout_s, output_kb << 10
        self._sandbox = Sandbox(Limits(memory_mb << 20, folder_mb << 20, max_processes))

    def run(self, command: str) -> Done:
        """Runs a command of the shell; files are kept as they were if it does not end in time."""
        given = json.dumps({"files": self.files, "command": command})
        try:
            output, _ = asyncio.run(self._sandbox.run_script(_SCRIPT, given, self._timeout_s, self._output_bytes))
        except asyncio.TimeoutError:
            return Done(124, f"no end after {self._timeout_s:g} s")
        if len(output) > self._output_bytes or not output.endswith(b"\n"):
            return Done(125, f"the command wrote more than {self._output_bytes} bytes, or took more than it may")
        found = json.loads(output)
        self.files = found["files"]
        return Done(found["status"], found["output"])
