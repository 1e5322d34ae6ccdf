"""Child process that parses and compares mathematical answers: `python -m groupgrad.rewards.math_worker`.

A formula such as 9^{9^{9^{9}}} keeps the interpreter inside one C call that no timeout in Python can interrupt. The
comparison therefore runs in a process that `MathVerifier` can kill. Requests and replies are JSON objects, one a line:

    {"gold": "72", "answer": "so \\boxed{72}" or null, "timeout_s": 10}
    {"correct": true, "gold": "72", "answer": "72"}

The reply holds the source texts of what was parsed; `gold` and `correct` are null if the gold cannot be parsed, and
`answer` is null if none was found. Before the first request the process writes `{"ready": true}` or
`{"ready": false, "error": "..."}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_LIMIT_BYTES = 4 << 30
_MATH_DELIMITER = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")
_PLAIN_NUMBER = re.compile(r"[-+]?\d[\d ,]*(\.\d+)?\s*%?")
_TEXT_GROUP = re.compile(r"\\(text|mathrm|textbf|mbox|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")


@lru_cache(maxsize=1024)
def parse_gold(gold: str) -> tuple[Any, ...]:
    r"""Parses a reference solution into expressions and their source text; () if it has no expression.

    Only the part after the last `####` counts (GSM8K). A plain number is read as a number and a bare formula (`x^2+1`,
    `(1, 2)`, `\frac12`) as LaTeX; in other texts, `\boxed{}`, `$...$` and then the last number are searched for.
    """
    from math_verify import parse

    gold = gold.rsplit("####", 1)[-1].strip()
    is_bare = not _MATH_DELIMITER.search(gold) and not _PLAIN_NUMBER.fullmatch(gold)
    if is_bare and gold and not _WORD.search(_TEXT_GROUP.sub("", gold)):
        parsed = parse(f"${gold}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        if any(not isinstance(item, str) for item in parsed):
            return tuple(parsed)
    return tuple(parse(gold, parsing_timeout=None))  # pyright: ignore[reportArgumentType]


def parse_answer(text: str) -> list[Any]:
    r"""Parses the answer in a completion: LaTeX in `\boxed{}`, else LaTeX after words such as "answer is".

    Units are dropped. Only the first candidate in that order is tried.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    extraction = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(units=True),
    )
    return parse(text, [extraction], extraction_mode="first_match", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def judge(gold: str, answer: str | None) -> dict[str, Any]:
    """Compares an answer with a gold solution and returns the reply."""
    from math_verify import verify

    parsed_gold: tuple[Any, ...] = ()
    with contextlib.suppress(Exception):
        parsed_gold = parse_gold(gold)
    if not parsed_gold:
        return {"correct": None, "gold": None, "answer": None}
    parsed: list[Any] = []
    correct = False
    with contextlib.suppress(Exception):
        parsed = [] if answer is None else parse_answer(answer)
        correct = bool(parsed) and bool(verify(list(parsed_gold), parsed, timeout_seconds=None))
    return {"correct": correct, "gold": _source(parsed_gold), "answer": _source(parsed) if parsed else None}


def main() -> None:
    """Answers requests until standard input ends."""
    # Replies go to the original standard output; whatever libraries print goes to standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    _limit_memory()
    try:
        import logging

        import math_verify  # noqa: F401

        logging.disable(logging.WARNING)
    except Exception as error:
        reply({"ready": False, "error": f"{type(error).__name__}: {error}"})
        return
    reply({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        # If the parent dies while a formula hangs, the kernel ends this process; no Python handler has to run.
        _alarm(int(request["timeout_s"]) + 5)
        reply(judge(request["gold"], request["answer"]))
        _alarm(0)


def _source(parsed: Any) -> str:
    texts = [item for item in parsed if isinstance(item, str)]
    return texts[-1] if texts else str(parsed[0])


def _alarm(seconds: int) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    except (ImportError, ValueError, OSError):
        pass  # this system has no memory limits; the deadline still applies


if __name__ == "__main__":
    main()
