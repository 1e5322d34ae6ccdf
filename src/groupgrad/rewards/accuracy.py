"""Rewards for correct mathematical answers, which math-verify checks in supervised child processes."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle

from groupgrad import compat
from groupgrad.concurrency.worker_process import WorkerNotStarted, WorkerProcess
from groupgrad.rewards import math_worker
from groupgrad.rewards.text import completion_text, turn_text

logger = logging.getLogger(__name__)

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


F = TypeVar("F", bound=Callable[..., Any])


def requires_math_verify(function: F) -> F:
    """Decorator: `RewardRunner` checks for math-verify at its construction and calls the function in this process."""
    function.__dict__.update(check_ready=_require_math_verify, starts_processes=True)
    return function


def _require_math_verify() -> None:
    compat.require("math-verify", "an accuracy reward")


_VERIFIER = MathVerifier()


@requires_math_verify
def accuracy_reward(
    completions: list[Any],
    solution: list[Any],
    log_extra: Callable[..., None] | None = None,
    log_metric: Callable[..., None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""1.0 for an answer that equals the solution mathematically, else 0.0; None if the solution cannot be parsed.

    `completions` are texts or message lists, of which the assistant's last message counts. The answer is LaTeX in
    `\boxed{}` or after words such as "the answer is". `solution` holds LaTeX, a plain number or formula, or a GSM8K
    solution that ends in `#### 72`; None gives None. A row that takes more than 10 seconds gets 0.0, or None if its
    solution is the cause; the calls with such rows log a warning and their share as `accuracy_reward/timed_out`. Logs
    the columns `solution`, `gold_parsed` and `answer_parsed`. Works in any thread. ImportError without math-verify.
    """
    answers: list[str | None] = [completion_text(completion) for completion in completions]
    return _reward(answers, solution, log_extra, log_metric)


@requires_math_verify
def reasoning_accuracy_reward(
    completions: list[Any],
    solution: list[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[..., None] | None = None,
    log_metric: Callable[..., None] | None = None,
    raw_completions: list[str] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` of the text after the reasoning, that is, after the last occurrence of any delimiter.

    `reasoning_delimiters` is `["</think>"]` by default. A completion without a delimiter has not finished its reasoning
    and gets 0.0, or None if its solution cannot be parsed. In training the `raw_completions` count, where a delimiter
    may be a special token or split from the message.
    """
    if isinstance(reasoning_delimiters, str):
        reasoning_delimiters = [reasoning_delimiters]
    delimiters = list(reasoning_delimiters or ["</think>"])
    texts = raw_completions or [turn_text(completion) for completion in completions]
    answers = [_after_last(text, delimiters) for text in texts]
    return _reward(answers, solution, log_extra, log_metric)


def _after_last(text: str, delimiters: list[str]) -> str | None:
    ends = [start + len(delimiter) for delimiter in delimiters if (start := text.rfind(delimiter)) >= 0]
    return text[max(ends) :] if ends else None


def _reward(
    answers: list[str | None],
    solution: list[Any],
    log_extra: Callable[..., None] | None,
    log_metric: Callable[..., None] | None,
) -> list[float | None]:
    _require_math_verify()
    golds = [None if gold is None else str(gold) for gold, _ in zip(solution, answers, strict=True)]
    verdicts = _VERIFIER.judge(golds, answers)
    timed_out = sum(verdict.timed_out for verdict in verdicts)
    if timed_out:
        logger.warning(
            "checking the answer took more than %g s (or the memory allowed) for %d of %d completions",
            _VERIFIER.timeout_s,
            timed_out,
            len(verdicts),
        )
        if log_metric is not None:
            log_metric("accuracy_reward/timed_out", timed_out / len(verdicts))
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
        log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
    return [None if verdict.correct is None else float(verdict.correct) for verdict in verdicts]
