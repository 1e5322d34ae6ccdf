"""Rewards for correct mathematical answers, which math-verify checks in supervised child processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from groupgrad import compat
from groupgrad.rewards.math_verifier import MathVerifier
from groupgrad.rewards.text import completion_text, turn_text

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def requires_math_verify(function: F) -> F:
    """Decorator: `RewardRunner` checks for math-verify before the first generation, and starts no worker of its own."""
    function.__dict__.update(check_ready=_require_math_verify, has_own_workers=True)
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
    may be a special token or split from the message. ValueError for an empty list or an empty delimiter.
    """
    if isinstance(reasoning_delimiters, str):
        reasoning_delimiters = [reasoning_delimiters]
    delimiters = ["</think>"] if reasoning_delimiters is None else list(reasoning_delimiters)
    if not delimiters or not all(delimiters):
        raise ValueError(
            f"reasoning_delimiters={delimiters!r}: nothing ends the reasoning; give texts such as '</think>'"
        )
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
    if len(solution) != len(answers):
        raise ValueError(
            f"{len(solution)} solutions for {len(answers)} completions: each completion is compared with its own; give "
            "one solution a completion"
        )
    golds = [None if gold is None else str(gold) for gold in solution]
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
