"""Compares mathematical answers with reference solutions in supervised child processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

ROW_TIMEOUT_S = 10.0
"""Seconds that parsing and comparing one row may take."""
START_TIMEOUT_S = 120.0
"""Seconds that a child process may take to import math-verify."""
MIN_ROWS_PER_WORKER = 32
HARMLESS_ANSWER = r"\boxed{1}"


@dataclass(slots=True, frozen=True)
class Verdict:
    """What became of one row."""

    correct: bool | None
    """None if the gold cannot be parsed, so that the row cannot be judged."""
    gold: str | None = None
    """Source text of the parsed gold, None if it cannot be parsed."""
    answer: str | None = None
    """Source text of the parsed answer, None if none was found."""
    timed_out: bool = False
    """True if the deadline passed or the child process died (of memory, for one)."""


class _Worker:
    """One child process. Used by one thread at a time."""

    def __init__(self) -> None:
        # The child finds what this process finds, however it came by its path; it must not see our terminal's Ctrl-C.
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
        self._lines: queue.Queue[str] = queue.Queue()
        # A thread that reads, because a pipe cannot be read with a deadline on every system.
        threading.Thread(target=self._read, name="math-worker-reader", daemon=True).start()
        ready = self._receive(time.monotonic() + START_TIMEOUT_S)
        if ready is None or not ready["ready"]:
            self.stop()
            reason = "it ended or did not start in time" if ready is None else ready["error"]
            raise RuntimeError(f"the process that checks mathematical answers did not start: {reason}")

    def judge(self, gold: str, answer: str | None, timeout_s: float) -> Verdict:
        """The verdict on one row; after one that timed out the process is gone."""
        deadline = time.monotonic() + timeout_s
        request = {"gold": gold, "answer": answer, "timeout_s": timeout_s}
        first = second = None
        try:
            if self._send(request):
                first = self._receive(deadline)
            if first is not None and first["gold"] is None:
                return Verdict(None)
            if first is not None:
                second = self._receive(deadline)
        finally:
            # Also on an interrupt: an answer still to come must not be read as that of the next row.
            if first is None or (first["gold"] is not None and second is None):
                self.stop()
        if first is None:
            return Verdict(None, timed_out=True)
        if second is None:
            return Verdict(False, gold=first["gold"], timed_out=True)
        return Verdict(second["correct"], gold=first["gold"], answer=second["answer"])

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if os.getpid() != self._owner_pid:
            return  # inherited over a fork; it belongs to the parent
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]

    def _send(self, request: dict[str, Any]) -> bool:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")  # pyright: ignore[reportOptionalMemberAccess]
            self._process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
        except (OSError, ValueError):
            return False
        return True

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        try:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return None
        return json.loads(line) if line else None

    def _read(self) -> None:
        with self._process.stdout as stream:  # pyright: ignore[reportOptionalContextManager]
            for line in stream:
                self._lines.put(line)
        self._lines.put("")


class MathVerifier:
    """Compares answers with gold solutions in child processes, each row within a deadline, from any thread.

    Processes start when first needed, at most `max_workers` of them (default: the processors, at most 4), and end with
    `close`, with this object, or with the interpreter. A row that passes its deadline costs its process, no other row.
    If its gold passes it with a harmless answer too, rows with that gold cannot be judged and are not tried again.
    """

    def __init__(self, timeout_s: float = ROW_TIMEOUT_S, max_workers: int | None = None):
        if not timeout_s > 0:
            raise ValueError(
                f"timeout_s={timeout_s}: no row can be judged in that time; set a positive number of seconds"
            )
        self.timeout_s = timeout_s
        self.max_workers = max_workers or min(os.cpu_count() or 1, 4)
        self._workers: list[_Worker] = []
        self._probed_golds: dict[str, bool] = {}  # by gold: whether any comparison with it can end
        self._reset()
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def judge(self, golds: Sequence[str | None], answers: Sequence[str | None]) -> list[Verdict]:
        """One verdict a row. A gold of None cannot be judged; an answer of None is wrong."""
        if self._pid != os.getpid():
            self._workers.clear()
            self._reset()
        rows = list(zip(golds, answers, strict=True))
        lanes = min(self.max_workers, max(1, len(rows) // MIN_ROWS_PER_WORKER))
        stopped = threading.Event()
        if lanes == 1:
            return self._judge_lane(rows, stopped)
        verdicts: list[Any] = [None] * len(rows)
        with ThreadPoolExecutor(lanes, thread_name_prefix="math-verifier") as threads:
            try:
                futures = [threads.submit(self._judge_lane, rows[lane::lanes], stopped) for lane in range(lanes)]
                for lane, future in enumerate(futures):
                    verdicts[lane::lanes] = future.result()
            except BaseException:
                stopped.set()
                raise
        return verdicts

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        with self._lock:
            self._idle.clear()
            _stop_all(self._workers)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(self.max_workers)
        self._idle: list[_Worker] = []

    def _judge_lane(self, rows: list[tuple[str | None, str | None]], stopped: threading.Event) -> list[Verdict]:
        verdicts = []
        worker = None
        with self._slots:
            try:
                for gold, answer in rows:
                    if stopped.is_set():
                        break
                    if gold is None or not self._probed_golds.get(gold, True):
                        verdicts.append(Verdict(None, timed_out=gold is not None))
                        continue
                    worker = self._ready(worker)
                    verdict = worker.judge(gold, answer, self.timeout_s)
                    if verdict.timed_out and gold not in self._probed_golds:
                        # Was it the gold? Then every completion of its group would wait in vain.
                        worker = self._ready(worker)
                        self._probed_golds[gold] = not worker.judge(gold, HARMLESS_ANSWER, self.timeout_s).timed_out
                    verdicts.append(verdict if self._probed_golds.get(gold, True) else Verdict(None, timed_out=True))
            finally:
                self._give_back(worker)
        return verdicts

    def _ready(self, worker: _Worker | None) -> _Worker:
        """This process if it still runs, otherwise an idle or a new one."""
        if worker is not None and worker.is_running:
            return worker
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_running:
                    return worker
        worker = _Worker()
        with self._lock:
            self._workers[:] = [known for known in self._workers if known.is_running]
            self._workers.append(worker)
        return worker

    def _give_back(self, worker: _Worker | None) -> None:
        if worker is not None and worker.is_running:
            with self._lock:
                self._idle.append(worker)


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()
