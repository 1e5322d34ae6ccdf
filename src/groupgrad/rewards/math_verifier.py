"""Compares mathematical answers with reference solutions in supervised child processes."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cloudpickle

from groupgrad.concurrency.worker_process import WorkerNotStarted, WorkerProcess
from groupgrad.rewards import math_worker

ROW_TIMEOUT_S = 10.0
"""Seconds to parse and compare one row."""
MEMORY_BYTES = 4 << 30
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
        self._num_workers = max_workers or min(os.cpu_count() or 1, 4)
        self._probes: dict[str, Verdict | None] = {}
        """Verdicts on the harmless answer, by gold, for golds with a row that timed out; None if it timed out too."""
        self._reset()

    def judge(self, golds: Sequence[str | None], answers: Sequence[str | None]) -> list[Verdict]:
        """Returns one verdict a row. A gold of None cannot be judged; an answer of None is wrong."""
        if self._pid != os.getpid():  # after a fork, threads of the parent may hold the pool's lock and workers
            self._reset()
        num_threads = min(self._num_workers, max(1, len(golds) // MIN_ROWS_PER_WORKER))
        if num_threads == 1:
            return list(map(self._judge_row, golds, answers))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="math-verifier") as threads:
            return list(threads.map(self._judge_row, golds, answers))

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()  # last in, first out: running workers first
        self._workers = [
            WorkerProcess(
                [cloudpickle.dumps(math_worker.judge)],
                name="math-verifier",
                initializer=math_worker.prepare,
                memory_bytes=MEMORY_BYTES,
                environment={"OMP_NUM_THREADS": "1"},
            )
            for _ in range(self._num_workers)
        ]
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

    def _judge_with(self, worker: WorkerProcess, gold: str, answer: str | None) -> Verdict:
        if gold not in self._probes or self._probes[gold] is not None:
            verdict = self._ask(worker, gold, answer)
            if verdict is not None:
                return verdict
            if gold not in self._probes:
                # If the gold itself is the cause, all completions of its group would time out.
                self._probes[gold] = self._ask(worker, gold, HARMLESS_ANSWER)
        probe = self._probes[gold]
        if probe is None or probe.correct is None:
            return Verdict(None, timed_out=True)
        return Verdict(False, gold=probe.gold, timed_out=True)

    def _ask(self, worker: WorkerProcess, gold: str, answer: str | None) -> Verdict | None:
        """The verdict on one row; None if there is none in time or in the memory allowed."""
        outcome = worker.call(0, (gold, answer), timeout_s=self.timeout_s).result()
        if isinstance(outcome.error, WorkerNotStarted):
            raise RuntimeError(f"the process that checks mathematical answers did not start: {outcome.error}")
        return None if outcome.error is not None else Verdict(**outcome.value)
