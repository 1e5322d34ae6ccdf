"""Shows a sweep on the page of `groupgrad view`, and carries out the commands that users give there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupgrad.apps.sweep.commands import check_queued
from groupgrad.apps.sweep.report import arms_in_turn, is_trained, steps_so_far, table
from groupgrad.apps.sweep.store import Store

TIMEOUT_S = 300
"""Longest time of a command that needs a process, most of which is the import of torch."""
MAX_COMMANDS = 20
"""Commands that the page lists."""


class CommandLinePanel:
    """The arms of a sweep in a folder. A clone is made by `groupgrad sweep clone` in a process of its own: it follows
    the same rules, and the page's process imports neither torch nor reward functions. Other commands are queued at
    once while the sweep is trained.

    ValueError or sqlite3.Error if the folder holds no sweep that can be read.
    """

    def __init__(self, folder: Path):
        self.path, self.name, self._store = folder, folder.resolve().name, Store(folder)
        self._known: tuple[Any, dict[str, Any]] | None = None

    def table(self) -> dict[str, Any]:
        """The arms, the best one first, what the sweep has cost, and the last commands."""
        written = [path.stat() for path in self._store.folder.glob(f"{self._store.path.name}*")]
        steps, in_turn = steps_so_far(self._store), arms_in_turn(self._store)
        version = steps, in_turn, [(status.st_mtime_ns, status.st_size) for status in written]
        if self._known is None or self._known[0] != version:
            commands = [command._asdict() for command in self._store.commands(MAX_COMMANDS)]
            shown = {"name": self.name, "path": str(self.path), **table(self._store), "commands": commands}
            self._known = version, shown
        return self._known[1]

    def act(self, kind: str, arm: int, settings: Sequence[str], *, from_weights: bool) -> str:
        """Gives a command and returns the message for the user. ValueError, with the reason, if it is refused."""
        if kind != "clone" and is_trained(self.path):  # which needs no check of settings
            found = self._store.find(str(arm))
            check_queued(self._store, kind, found)
            self._store.queue(kind, arm)
            return f"{kind} of {found.name}: queued; the sweep takes it after the present step"
        flags = [f"--set={setting}" for setting in settings] + (["--from-weights"] if from_weights else [])
        command = [sys.executable, "-m", "groupgrad", "sweep", kind, str(self.path.absolute()), str(arm), *flags]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"the command has not ended within {TIMEOUT_S} s and was given up") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if not line.startswith("(GROUPGRAD_TRACEBACK")]
            found = [line for line in lines if line.startswith("groupgrad sweep: error: ")]
            message = "\n".join(lines[lines.index(found[0]) :] if found else lines[-3:])
            raise ValueError(message.removeprefix("groupgrad sweep: error: ") or f"exit code {done.returncode}")
        return done.stdout.strip()
