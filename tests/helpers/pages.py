"""The page of runs in a headless Chromium: where it is, and a server of runs and sweeps.

Tests are skipped where Chromium or Playwright is missing (`apt-get install chromium`, `pip install playwright`); with
`GROUPGRAD_NEED_BROWSER=1` they fail there.
"""

from __future__ import annotations

import importlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from synthetic_run import write_run

from groupgrad.apps.cli.sweep import CommandLinePanel
from groupgrad.apps.cli.view import RunPaths, _listen
from groupgrad.apps.sweep.store import ArmTurn, Store
from groupgrad.apps.view.server import make_app

IS_NEEDED = os.environ.get("GROUPGRAD_NEED_BROWSER") == "1"
find = importlib.import_module if IS_NEEDED else pytest.importorskip
playwright: Any = find("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOW = "there is no Chromium: apt-get install chromium"
NEEDS_BROWSER = pytest.mark.skipif(CHROMIUM is None and not IS_NEEDED, reason=HOW)


def wait_until(page: Any, condition: str, *, timeout_s: float = 20.0) -> None:
    """Waits for a JavaScript condition; the page's policy forbids Playwright's own way, which evaluates a text."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


@contextmanager
def served(*folders: Path, sweeps: Sequence[Any] = ()) -> Iterator[str]:
    """The address of a server of these runs, those that come later too, and of sweeps."""
    listener = _listen("127.0.0.1", 0)
    paths = RunPaths(list(map(str, folders)))
    app = make_app(paths.runs, sweeps, token="right" if sweeps else None)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/" + ("?token=right" if sweeps else "")
    finally:
        server.should_exit = True
        thread.join(10)


class Panel(CommandLinePanel):
    """A sweep whose commands are noted, and refused or queued."""

    def act(self, kind: str, arm: int, settings: Sequence[str], *, from_weights: bool) -> str:
        if "beta=-1" in settings:
            raise ValueError("beta=-1 is negative")
        self._store.queue(kind, arm, dict(setting.split("=") for setting in settings), from_weights)
        return f"{kind}: queued"


def make_sweep_folder(folder: Path) -> tuple[Store, Panel]:
    """A sweep of two arms, the first of which has made steps and has a run."""
    store = Store(folder, create=True)
    store.add_arms([("01-beta=0", 0, {"beta": 0.0}), ("02-beta=0.1", 0, {"beta": 0.1})])
    store.end_turn(1, ArmTurn(0, 5, train_s=5.0, switch_s=0.1), 20, {})
    write_run(folder / "arms" / "01-beta=0", steps=5, rows=8, tokens=8)
    return store, Panel(folder)
