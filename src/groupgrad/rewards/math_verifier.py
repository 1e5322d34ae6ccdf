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
from collections.abc import Iterable, Sequence
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
    `close`, with this object, or with the interpreter. A row that passes its deadline costs the process it runs in.
    If a harmless answer to the same gold passes the deadline too, that gold is not tried again.
    """

    def __init__(self, timeout_s: float = ROW_TIMEOUT_S, max_workers: int | None = None):
        if not timeout_s > 0:
            raise ValueError(
                f"timeout_s={timeout_s}: no row can be judged in that time; set a positive number of seconds"
            )
        self.timeout_s = timeout_s
        self._workers = [_Worker() for _ in range(max_workers or min(os.cpu_count() or 1, 4))]
        self._probes: dict[str, Verdict | None] = {}
        """Verdicts on the harmless answer, by gold, for golds with a row that timed out; None if it timed out too."""
        self._reset()
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def judge(self, golds: Sequence[str | None], answers: Sequence[str | None]) -> list[Verdict]:
        """Returns one verdict a row. A gold of None cannot be judged; an answer of None is wrong."""
        if self._pid != os.getpid():  # after a fork, threads of the parent may hold the pool's lock and workers
            self._reset()
        rows = list(zip(golds, answers, strict=True))
        num_lanes = min(len(self._workers), max(1, len(rows) // MIN_ROWS_PER_WORKER))
        stopped = threading.Event()
        if num_lanes == 1:
            return self._judge_rows(rows, stopped)
        verdicts: list[Any] = [None] * len(rows)
        with ThreadPoolExecutor(num_lanes, thread_name_prefix="math-verifier") as threads:
            try:
                lanes = threads.map(lambda i: self._judge_rows(rows[i::num_lanes], stopped), range(num_lanes))
                for i, lane_verdicts in enumerate(lanes):
                    verdicts[i::num_lanes] = lane_verdicts
            except BaseException:
                stopped.set()
                raise
        return verdicts

    def close(self) -> None:
        """Ends the processes; a later call starts new ones."""
        _stop_all(self._workers)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # last in, first out: running workers first
        for worker in reversed(self._workers):
            self._idle.put(worker)

    def _judge_rows(self, rows: Sequence[tuple[str | None, str | None]], stopped: threading.Event) -> list[Verdict]:
        verdicts = []
        worker = self._idle.get()
        try:
            for gold, answer in rows:
                if stopped.is_set():
                    break
                verdicts.append(Verdict(None) if gold is None else self._judge_row(worker, gold, answer))
        finally:
            self._idle.put(worker)
        return verdicts

    def _judge_row(self, worker: _Worker, gold: str, answer: str | None) -> Verdict:
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
        self._replies: queue.Queue[str] = queue.Queue()

    @property
    def is_running(self) -> bool:
        """False also in a fork of the process that started it."""
        return self._process is not None and os.getpid() == self._owner_pid and self._process.poll() is None

    def judge(self, gold: str, answer: str | None, timeout_s: float) -> Verdict | None:
        """Returns the verdict on one row; None, and the process is ended, if there is none in time."""
        if not self.is_running:
            self._start()
        reply = None
        try:
            with contextlib.suppress(OSError):  # the process has died
                self._send({"gold": gold, "answer": answer, "timeout_s": timeout_s})
                reply = self._receive(timeout_s)
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
        self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]

    def _start(self) -> None:
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
        self._replies = queue.Queue()
        # A thread reads, because not every system can read a pipe with a deadline.
        arguments = (self._process.stdout, self._replies)
        threading.Thread(target=_read_lines, args=arguments, name="math-worker-reader", daemon=True).start()
        ready = self._receive(START_TIMEOUT_S)
        if ready is None or not ready["ready"]:
            self.stop()
            reason = "it ended or did not start in time" if ready is None else ready["error"]
            raise RuntimeError(f"the process that checks mathematical answers did not start: {reason}")

    def _send(self, request: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(request) + "\n")  # pyright: ignore[reportOptionalMemberAccess]
        self._process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Returns the next line of the process; None if there is none in time or the process has ended."""
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return json.loads(line) if line else None


def _read_lines(stream: Iterable[str], lines: queue.Queue[str]) -> None:
    with contextlib.closing(stream):  # pyright: ignore[reportArgumentType]
        for line in stream:
            lines.put(line)
    lines.put("")


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
