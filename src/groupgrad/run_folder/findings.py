"""Findings of a check, and how they are printed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]

_STATUS_WIDTH, _TOPIC_WIDTH = len("warning") + 2, len("agreement") + 2


@dataclass(slots=True, frozen=True)
class Finding:
    """One result of a check."""

    topic: str
    text: str
    """The observation, with its numbers."""
    status: Status = "ok"
    setting: str = ""
    """The change that mends it, by the names of settings."""


def count(findings: Sequence[Finding], status: Status) -> int:
    """Returns the number of findings of a status."""
    return sum(finding.status == status for finding in findings)


def as_text(findings: Sequence[Finding], width: int) -> str:
    """Returns the findings as lines of at most `width` characters, in columns."""
    indent = " " * (_STATUS_WIDTH + _TOPIC_WIDTH)
    lines = []
    for finding in findings:
        head = f"{finding.status:<{_STATUS_WIDTH}}{finding.topic:<{_TOPIC_WIDTH}}"
        text = " ".join(part for part in (finding.text, finding.setting) if part)
        lines += textwrap.wrap(
            head + text, max(width, 60), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "".join(f"{line}\n" for line in lines)


def in_numbers(findings: Sequence[Finding]) -> str:
    """Returns the numbers of errors and warnings, such as `0 errors, 1 warning`."""
    return ", ".join(_counted(count(findings, status), status) for status in ("error", "warning"))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
