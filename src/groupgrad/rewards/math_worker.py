"""Parses and compares mathematical answers, in a worker process of `MathVerifier`.

A formula such as 9^{9^{9^{9}}} keeps the interpreter inside one C call that no timeout in Python can interrupt, so the
comparison runs in a process that can be killed.
"""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache
from typing import Any

from groupgrad.concurrency.worker_main import drop_output

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
    """Compares an answer with a gold solution and returns the fields of a `Verdict`.

    `gold` and `answer` are the source texts of what was parsed; `gold` and `correct` are None if the gold cannot be
    parsed, and `answer` is None if none was found.
    """
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


def prepare() -> None:
    """Loads math-verify in a new process, whose output is dropped: libraries print remarks about formulas."""
    import math_verify  # noqa: F401

    drop_output()


def _source(parsed: Any) -> str:
    texts = [item for item in parsed if isinstance(item, str)]
    return texts[-1] if texts else str(parsed[0])
