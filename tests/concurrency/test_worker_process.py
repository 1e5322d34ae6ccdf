"""Calls in a child process are answered whatever the function does, and no process is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import cloudpickle
import psutil
import pytest

from groupgrad.concurrency.worker_process import WorkerDied, WorkerProcess
from groupgrad.concurrency.workers import NoAnswer

offset = 10


def make(*functions: Any, **options: Any) -> WorkerProcess:
    return WorkerProcess([cloudpickle.dumps(function) for function in functions], name="worker", **options)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_calls_are_answered_whatever_the_function_does():
    class Odd(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} and {second}")

    def odd():
        raise Odd(1, 2)

    add = lambda x: (x + offset, os.getpid(), threading.current_thread() is threading.main_thread())  # noqa: E731
    worker = make(
        add,
        time.sleep,
        lambda: ctypes.string_at(0),
        lambda: os._exit(3),
        lambda num_bytes: len(bytearray(num_bytes)),
        odd,
        lambda: sys.exit(2),
        threading.Lock,
        memory_bytes=1 << 30,
    )

    def call(*arguments: Any, timeout_s: float | None = None) -> Any:
        return worker.call(arguments[0], arguments[1:], timeout_s=timeout_s).result()

    first = call(0, 1)
    assert first.value == (11, worker.pid, True) and worker.pid != os.getpid()
    assert type(call(4, 2 << 30).error) is MemoryError
    assert "Odd: 1 and 2" in str(call(5).error) and "in odd" in str(call(5).error.__cause__)
    assert type(call(6).error) is SystemExit
    assert "pickle" in str(call(7).error)
    assert call(0, 2).value[1] == first.value[1]  # none of these has cost the process

    started = time.monotonic()
    late = call(1, 60, timeout_s=0.3)
    assert type(late.error) is NoAnswer and late.timed_out and time.monotonic() - started < 3
    assert not psutil.pid_exists(first.value[1])
    for number, end in ((2, "was killed by SIGSEGV"), (3, "ended with exit code 3")):
        died = call(number)
        assert type(died.error) is WorkerDied and str(died.error) == end and not died.timed_out
    assert call(0, 3).value[0] == 13
    between = psutil.Process(worker.pid)
    between.kill()  # between two calls
    while is_alive(between):
        time.sleep(0.01)
    assert call(0, 3).value[0] == 13
    worker.kill()
    assert worker.pid is None or not psutil.pid_exists(worker.pid)
    assert call(0, 4).value[0] == 14


def test_a_kill_takes_back_all_calls_and_descendants(tmp_path):
    def work():
        child = subprocess.Popen(["sleep", "60"])
        path.write_text(f"{child.pid}.")
        child.wait()

    path = tmp_path / "pid"
    worker = make(work, lambda: 1)
    running, waiting = worker.call(0, ()), worker.call(1, ())
    while not path.exists() or not path.read_text().endswith("."):
        time.sleep(0.02)
    child = psutil.Process(int(path.read_text()[:-1]))
    worker.kill()
    assert type(running.result(10).error) is WorkerDied and type(waiting.result(10).error) is WorkerDied
    ends_at = time.monotonic() + 10.0
    while is_alive(child) and time.monotonic() < ends_at:  # a killed process ends a moment later
        time.sleep(0.01)
    assert not is_alive(child)
    assert worker.call(1, ()).result().value == 1


def test_a_function_that_returns_while_it_is_killed_has_no_outcome(tmp_path, monkeypatch):
    worker = make(lambda path: open(path, "w").close() or time.sleep(0.5))
    running = worker.call(0, (str(tmp_path / "begun"),))
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    monkeypatch.setattr("groupgrad.concurrency.worker_process._kill_tree", lambda process: process.join(1.0))
    worker.kill()
    monkeypatch.undo()
    assert type(running.result(10).error) is WorkerDied


def test_process_and_thread_end_with_the_object():
    worker = make(os.getpid)
    pid = worker.call(0, ()).result().value
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "worker"]
    del worker
    thread.join(10)
    assert not thread.is_alive() and not psutil.pid_exists(pid)


def test_signals_of_the_terminal_are_the_parents(tmp_path):
    worker = make(os.getpid, lambda: time.sleep(0.5) or "done")
    pid = worker.call(0, ()).result().value
    running = worker.call(1, ())
    time.sleep(0.2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    assert running.result().value == "done" and worker.pid == pid


SCRIPT = """
import os, sys, time
import cloudpickle
from groupgrad.concurrency.worker_process import WorkerProcess

def hang(x):
    while x:
        sum(range(10**6))

print("main", flush=True)
workers = [WorkerProcess([cloudpickle.dumps(hang)], name="worker") for _ in range(2)]
for worker, busy in zip(workers, (False, True)):
    worker.call(0, (False,)).result()
    if busy:
        worker.call(0, (True,))
time.sleep(0.2)
print(*(worker.pid for worker in workers), flush=True)
{end}
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise SystemExit(3)"])
def test_no_worker_outlives_its_parent(tmp_path, end):
    script = tmp_path / "script.py"  # without a main guard
    script.write_text(SCRIPT.format(end=end))
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    lines = out.stdout.splitlines()
    assert lines[0] == "main" and len(lines) == 2, out.stderr
    assert out.returncode == (3 if "3" in end else -9)
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, map(int, lines[1].split()))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, map(int, lines[1].split())))
