"""The child process that parses and compares mathematical answers: `python -m groupgrad.rewards.math_worker`.

A formula such as 9^{9^{9^{9}}} keeps the interpreter inside one C call that no Python-level timeout can leave, so the
comparison runs in a process of its own that its parent can end. One JSON object a line on standard input:

    {"gold": "72", "answer": "so \\boxed{72}" or null, "timeout_s": 10}

and one or two on standard output: `{"gold": "72"}` as soon as the gold is parsed (null: it cannot be, and nothing
follows), then `{"correct": true, "answer": "72"}` (an answer of null: none was found). The first line of all is
`{"ready": true}` or `{"ready": false, "error": "..."}`.
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
    r"""What a reference solution says: expressions and their source text, () if there is nothing to compare with.

    Takes the part after the last `####` (GSM8K). A plain number is read as one; a bare formula (`x^2+1`, `(1, 2)`,
    `\frac12`) as LaTeX; a text is searched for `\boxed{}`, `$...$` and then for its last number.
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
    r"""What a completion gives as its answer: LaTeX in `\boxed{}`, or else anchored by words such as "answer is".

    Units are dropped; of several candidates the first in that order is taken and none other is tried.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    extraction = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(units=True),
    )
    return parse(text, [extraction], extraction_mode="first_match", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def answer(request: dict[str, Any], reply: Any) -> None:
    """Serve one request; `reply` is called with each object to send."""
    from math_verify import verify

    gold: tuple[Any, ...] = ()
    with contextlib.suppress(Exception):
        gold = parse_gold(request["gold"])
    reply({"gold": _source(gold) if gold else None})
    if not gold:
        return
    parsed: list[Any] = []
    correct = False
    with contextlib.suppress(Exception):
        parsed = [] if request["answer"] is None else parse_answer(request["answer"])
        correct = bool(parsed) and bool(verify(list(gold), parsed, timeout_seconds=None))
    reply({"correct": correct, "answer": _source(parsed) if parsed else None})


def main() -> None:
    """Serve requests until standard input ends."""
    # Libraries may print; the protocol keeps the real standard output to itself.
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
        # Should the parent die while a formula is stuck, the kernel ends this process: no Python handler is needed.
        _alarm(int(request["timeout_s"]) + 5)
        answer(request, reply)
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
        pass  # not offered by this system; the deadline still holds


if __name__ == "__main__":
    main()
