"""Compares mathematical answers with reference solutions in supervised child processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

ROW_TIMEOUT_S = 10.0
"""Seconds to parse and compare one row."""
START_TIMEOUT_S = 120.0
"""Seconds for a child process to import math-verify."""
MIN_ROWS_PER_WORKER = 32
HARMLESS_ANSWER = r"\boxed{1}"


@dataclass(slots=True, frozen=True)
class Verdict:
    """Result of comparing one answer with its gold solution."""

    correct: bool | None
    """None if the gold cannot be parsed or compared."""
    gold: str | None = None
    """Source text of the parsed gold; None if it cannot be parsed."""
    answer: str | None = None
    """Source text of the parsed answer; None if there is none."""
    timed_out: bool = False
    """True if the deadline passed or the child process died, for example of its memory limit."""


class MathVerifier:
    """Compares answers with gold solutions in child processes, with a deadline for each row. Thread-safe.

    At most `max_workers` processes (default: the number of CPUs, at most 4) start when first needed. They end with
    this object or with the interpreter. A row that passes its deadline costs the process it runs in.
    If a harmless answer to the same gold passes the deadline too, that gold is not tried again.
    """

    def __init__(self, timeout_s: float = ROW_TIMEOUT_S, max_workers: int | None = None):
        self.timeout_s = timeout_s
        self._workers = [_Worker() for _ in range(max_workers or min(os.cpu_count() or 1, 4))]
        self._probes: dict[str, Verdict | None] = {}
        """Verdicts on the harmless answer, by gold, for golds with a row that timed out; None if it timed out too."""
        self._reset()
        weakref.finalize(self, _stop_all, self._workers)

    def judge(self, golds: Sequence[str | None], answers: Sequence[str | None]) -> list[Verdict]:
        """Returns one verdict a row. A gold of None cannot be judged; an answer of None is wrong."""
        if self._pid != os.getpid():  # after a fork, threads of the parent may hold the pool's lock and workers
            self._reset()
        num_threads = min(len(self._workers), max(1, len(golds) // MIN_ROWS_PER_WORKER))
        if num_threads == 1:
            return list(map(self._judge_row, golds, answers))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="math-verifier") as threads:
            return list(threads.map(self._judge_row, golds, answers))

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # last in, first out: running workers first
        for worker in reversed(self._workers):
            self._idle.put(worker)

    def _judge_row(self, gold: str | None, answer: str | None) -> Verdict:
        if gold is None:
            return Verdict(None)
        worker = self._idle.get()
        try:
            return self._judge_with(worker, gold, answer)
        finally:
            self._idle.put(worker)

    def _judge_with(self, worker: _Worker, gold: str, answer: str | None) -> Verdict:
        if gold not in self._probes or self._probes[gold] is not None:
            verdict = worker.judge(gold, answer, self.timeout_s)
            if verdict is not None:
                return verdict
            if gold not in self._probes:
                # If the gold itself is the cause, all completions of its group would time out.
                self._probes[gold] = worker.judge(gold, HARMLESS_ANSWER, self.timeout_s)
        probe = self._probes[gold]
        if probe is None or probe.correct is None:
            return Verdict(None, timed_out=True)
        return Verdict(False, gold=probe.gold, timed_out=True)


class _Worker:
    """A child process for one thread at a time; it starts with the first call and again after it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner_pid = 0

    @property
    def is_running(self) -> bool:
        """False also in a fork of the process that started it."""
        return self._process is not None and os.getpid() == self._owner_pid and self._process.poll() is None

    def judge(self, gold: str, answer: str | None, timeout_s: float) -> Verdict | None:
        """Returns the verdict on one row; None, and the process is ended, if there is none in time."""
        process = self._process if self._process is not None and self.is_running else self._start()
        reply = None
        try:
            with contextlib.suppress(OSError, ValueError):  # the process has died, or `stop` closes its pipes
                request = json.dumps({"gold": gold, "answer": answer, "timeout_s": timeout_s})
                print(request, file=process.stdin, flush=True)
                reply = _receive(process, timeout_s)
        finally:
            # Also on KeyboardInterrupt: a late reply must not be read as the next row's.
            if reply is None:
                self.stop()
        return None if reply is None else Verdict(**reply)

    def stop(self) -> None:
        """Kills the process, unless it belongs to the parent of this fork."""
        if self._process is None or os.getpid() != self._owner_pid:
            return
        self._process.kill()
        with contextlib.suppress(OSError), self._process:  # closes the pipes and waits
            pass

    def _start(self) -> subprocess.Popen[str]:
        # The child imports from the same paths as this process, and does not get the terminal's Ctrl-C.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "groupgrad.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._owner_pid = os.getpid()
        ready = _receive(self._process, START_TIMEOUT_S)
        if ready is None or not ready["ready"]:
            self.stop()
            reason = "it ended or did not start in time" if ready is None else ready["error"]
            raise RuntimeError(f"the process that checks mathematical answers did not start: {reason}")
        return self._process


def _receive(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any] | None:
    """Returns the next line of the process; None if it has ended. It is killed if it writes none in time."""
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        process.kill()

    watchdog = threading.Timer(timeout_s, kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        line = process.stdout.readline()  # pyright: ignore[reportOptionalMemberAccess]
    finally:
        watchdog.cancel()
    # A reply that comes while the process is being killed is late too: the process cannot take another row.
    return json.loads(line) if line.endswith("\n") and not is_late.is_set() else None


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
