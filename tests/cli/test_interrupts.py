"""Ctrl-C on a terminal ends each command with its exit status and at most one line."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic_run import write_run

CTRL_C = b"\x03"
ON_ITS_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background
os.execv(sys.executable, [sys.executable, "-m", "groupgrad", *sys.argv[1:]])
"""
"""Becomes the command, which the keys of its terminal interrupt."""


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.keys, screen = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_ITS_TERMINAL, *arguments],
            env=environment, stdin=screen, stdout=screen, stderr=screen, start_new_session=True,
        )  # fmt: skip
        os.close(screen)

    def read(self, until: bytes = b"") -> str:
        """Returns what the command prints from now on: all of it, or up to the text `until`."""
        shown = b""
        while not until or until not in shown:
            try:
                part = os.read(self.keys, 65536)
            except OSError:  # the command has ended
                part = b""
            if not part:
                assert not until, shown.decode()
                break
            shown += part
        return shown.decode().replace("\r", "")

    def interrupted(self) -> tuple[int, str]:
        """Presses Ctrl-C. Returns the exit status, and what is printed after it."""
        os.write(self.keys, CTRL_C)
        shown = self.read().removeprefix("^C")
        return self.process.wait(30), shown


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    started: list[Terminal] = []
    yield started
    for terminal in started:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.keys)


@pytest.mark.slow
def test_a_page_is_served_here_alone_and_ended_without_a_word(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(terminal := Terminal("view", str(write_run(tmp_path / "run", steps=2, rows=4)), "--port", "0"))
    shown = terminal.read(b"(Ctrl-C ends it)\r\n")
    address = re.search(r"^run at (http://127\.0\.0\.1:\d+/) ", shown, re.MULTILINE)
    assert address is not None
    with urllib.request.urlopen(address[1] + "api/runs") as answer:
        assert json.load(answer)[0]["name"] == "run"
    assert terminal.interrupted() == (0, "\n")


def test_a_command_says_that_it_was_interrupted(tmp_path: Path, terminals: list[Terminal]) -> None:
    """The command reads a file that comes to no end."""
    os.mkfifo(tmp_path / "sweep.yaml")
    terminals.append(terminal := Terminal("sweep", str(tmp_path / "sweep.yaml"), "--dry-run"))
    with open(tmp_path / "sweep.yaml", "w"):  # returns when the command has opened it too
        assert terminal.interrupted() == (130, "\ngroupgrad sweep: interrupted\n")


@pytest.mark.slow
def test_the_demo_is_interrupted_while_it_makes_its_model(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(terminal := Terminal("demo", "--tiny", "--output-dir", str(tmp_path), "--warm-up-steps", "100000"))
    terminal.read(b"1. Base model:")
    status, shown = terminal.interrupted()
    assert status == 130 and shown.endswith("\ngroupgrad demo: interrupted\n") and "Traceback" not in shown


@pytest.mark.slow
def test_a_check_that_is_interrupted_prints_what_it_has_found(
    tmp_path: Path, model_dir: Path, terminals: list[Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "what"}\n' * 8)
    Path("own_rewards.py").write_text(
        "import time\n\ndef waits(**columns):\n    print('the reward waits', flush=True)\n    time.sleep(300)\n"
    )
    run = ["--model_name_or_path", str(model_dir), "--dataset_name", "rows.jsonl", "--output_dir", "out"]
    run += ["--reward_funcs", "own_rewards.waits", "--use_cpu", "--max_completion_length", "8", "--max_steps", "1"]
    terminals.append(terminal := Terminal("check", *run, "--report_to", "none", "--bf16", "False"))
    terminal.read(b"the reward waits")
    status, shown = terminal.interrupted()
    assert status == 130 and "Traceback" not in shown
    assert "error    round      it was stopped by SIGINT\n\n1 error, " in shown
    assert shown.endswith("\n\ngroupgrad check: interrupted\n")
