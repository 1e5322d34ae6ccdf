from __future__ import annotations

import atexit
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from groupgrad.activity import Timings
from groupgrad.run_folder.progress import ProgressCallback

LOGS = {"loss": 0.0, "reward": 0.5, "completions/mean_length": 40.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def terminal(monkeypatch, columns: int = 100) -> SimpleNamespace:
    """Replaces standard output and error by a simulated terminal.

    Not a fixture, since pytest restores its own streams between the set-up of a test and its call.
    """
    streams = SimpleNamespace(out=Terminal(), err=Terminal())
    monkeypatch.setattr(sys, "stdout", streams.out)
    monkeypatch.setattr(sys, "stderr", streams.err)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "30")
    return streams


def run_state(step: int = 0, *, main: bool = True) -> SimpleNamespace:
    return SimpleNamespace(is_world_process_zero=main, global_step=step, max_steps=8)


ARGS = SimpleNamespace(disable_tqdm=False)


def begun(state: SimpleNamespace | None = None, args: Any = ARGS, **options: Any) -> ProgressCallback:
    progress = ProgressCallback(**options)
    progress.on_train_begin(args, state or run_state(), None)
    return progress


def frames(stream: io.StringIO) -> list[str]:
    """Returns the drawn text, one entry a redraw."""
    return [frame.strip() for frame in re.split(r"\r|\n", stream.getvalue().replace("\x1b[A", "")) if frame.strip()]


def test_the_bar_shows_step_numbers_and_phase(monkeypatch):
    streams = terminal(monkeypatch)
    progress = begun(run_state(2))
    timings = Timings(progress.set_phase)
    with timings.phase("sampling"):
        with timings.phase("rewards"):
            assert progress.phase == "rewards"
        progress._refreshed_at = float("-inf")
        progress.set_numbers(reward=0.12345, length=45.4, tokens_per_second=1234.4)
        last = frames(streams.err)[-1]
        assert "| 2/8 [" in last and last.endswith("reward=0.123 len=45 tok/s=1234 | sampling")
    progress.close()
    assert frames(streams.err)[-1].endswith("reward=0.123 len=45 tok/s=1234")


def test_the_bar_is_drawn_at_most_twice_a_second(monkeypatch):
    streams, clock = terminal(monkeypatch), Clock()
    progress = begun(clock=clock)
    before = len(frames(streams.err))
    for i in range(100):
        clock.now += 0.01
        progress.set_numbers(reward=float(i))
    assert 1 <= len(frames(streams.err)) - before <= 2
    progress.close()


def test_the_last_of_several_phases_is_shown_half_a_second_later(monkeypatch):
    streams, progress = terminal(monkeypatch), begun()
    progress.set_phase("training")
    progress.set_phase("sampling")
    before = len(frames(streams.err))
    for phase in ("rewards", "rewards", "scoring"):
        progress.set_phase(phase)
    assert len(frames(streams.err)) == before
    deadline = time.monotonic() + 20
    while len(frames(streams.err)) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [frame.split()[-1] for frame in frames(streams.err)[before:]] == ["scoring"]
    assert not any("training" in frame for frame in frames(streams.err))
    progress.set_phase("training")
    progress.close()
    assert progress._timer is None


def test_a_log_event_is_one_line_on_standard_output(monkeypatch):
    streams, clock, state = terminal(monkeypatch), Clock(), run_state()
    progress = begun(state, clock=clock)
    for step in (2, 4):
        state.global_step = step
        clock.now += 3.0
        progress.on_step_end(ARGS, state, None)
        progress.on_log(ARGS, state, None, logs=LOGS)
    progress.on_train_end(ARGS, state, None)
    lines = streams.out.getvalue().splitlines()
    assert [line.split("step ")[1][0] for line in lines] == ["2", "4"]
    assert all(line.endswith("  1.50 s/step") for line in lines)
    assert "4/8" in frames(streams.err)[-1]


def test_the_evaluation_bar_is_removed_at_the_end(monkeypatch):
    streams, state = terminal(monkeypatch), run_state()
    progress = begun(state)
    for _ in range(3):
        progress.on_prediction_step(ARGS, state, None, eval_dataloader=[0, 0, 0])
    assert any("/3 [" in frame and "evaluation" in frame for frame in frames(streams.err))
    progress.on_evaluate(ARGS, state, None)
    assert progress._evaluation_bar is None
    progress.on_prediction_step(ARGS, state, None, eval_dataloader=iter([0]))  # an iterator has no length
    progress.on_predict(ARGS, state, None, metrics={})
    progress.close()


def test_an_exception_leaves_no_bar_and_a_second_run_starts_clean(monkeypatch):
    streams, progress, state = terminal(monkeypatch), ProgressCallback(), run_state()
    with pytest.raises(KeyboardInterrupt), progress:
        progress.on_train_begin(ARGS, state, None)
        progress.on_prediction_step(ARGS, state, None, eval_dataloader=[0, 0])
        raise KeyboardInterrupt
    assert progress._bar is None and progress._evaluation_bar is None
    assert streams.err.getvalue().endswith(("\n", "\r"))
    progress.close()
    for _ in range(2):
        progress.on_train_begin(ARGS, state, None)
    assert progress._bar.pos == 0
    progress.close()


@pytest.mark.parametrize("reason", ["no terminal", "disable_tqdm", "another rank"])
def test_without_a_bar_there_is_one_plain_line_a_log(monkeypatch, reason):
    """And nothing on other ranks than the first."""
    streams = terminal(monkeypatch)
    if reason == "no terminal":
        streams = SimpleNamespace(out=io.StringIO(), err=io.StringIO())
        monkeypatch.setattr(sys, "stderr", streams.err)
        monkeypatch.setattr(sys, "stdout", streams.out)
    args, state = SimpleNamespace(disable_tqdm=reason == "disable_tqdm"), run_state(main=reason != "another rank")
    progress = begun(state, args)
    for step in range(1, 9):
        state.global_step = step
        for phase in ("sampling", "training"):
            progress.set_phase(phase)
        progress.set_numbers(reward=1.0)
        progress.on_step_end(args, state, None)
        progress.on_prediction_step(args, state, None, eval_dataloader=[0])
        progress.on_evaluate(args, state, None)
        if step % 4 == 0:
            progress.on_log(args, state, None, logs=LOGS)
    progress.on_train_end(args, state, None)
    assert streams.err.getvalue() == ""
    lines = [line[:6] for line in streams.out.getvalue().splitlines()]
    assert lines == ([] if reason == "another rank" else ["step 4", "step 8"])


def draw_a_run_that_is_left() -> None:
    state = run_state()
    progress = begun(state)
    progress.set_phase("sampling")
    state.global_step = 2
    progress.on_step_end(ARGS, state, None)
    progress.on_log(ARGS, state, None, logs=LOGS)
    progress.set_phase("training")


def shown_on_a_terminal(draw: Callable[[], None]) -> str:
    """Returns the text that a process shows on a real terminal of 90 columns while it draws and when it ends."""
    process, terminal = pty.fork()
    if process == 0:
        code = 1
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
            os.environ.pop("COLUMNS", None), os.environ.pop("LINES", None)
            atexit._clear()  # what the tests have registered
            draw()
            atexit._run_exitfuncs()
            code = 0
        finally:
            os._exit(code)
    chunks = []
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # on Linux, the other end has closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, b"".join(chunks)
    return b"".join(chunks).decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_real_terminal_lines_go_above_the_bar_and_an_abandoned_bar_ends_its_line():
    drawn = shown_on_a_terminal(draw_a_run_that_is_left)
    assert re.search(r"\r *\rstep 2  reward  0\.500  loss  0\.0000 .*\r\n", drawn)  # the bar is wiped, then the line
    assert drawn.endswith("\r\n")
    assert "2/8 [" in drawn.rstrip().split("\r")[-1]
    assert all(len(frame) <= 90 for frame in re.split(r"[\r\n]", drawn))
