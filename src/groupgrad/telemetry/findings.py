"""Findings of a check, and how they are printed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]

_STATUS_WIDTH = len("warning") + 2


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
    """Returns the findings as lines of at most `width` characters, in columns, and their numbers in the last line."""
    topic_width = max((len(finding.topic) for finding in findings), default=0) + 2
    indent = " " * (_STATUS_WIDTH + topic_width)
    lines = []
    for finding in findings:
        head = f"{finding.status:<{_STATUS_WIDTH}}{finding.topic:<{topic_width}}"
        text = " ".join(part for part in (finding.text, finding.setting) if part)
        lines += textwrap.wrap(
            head + text, max(width, 60), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    errors, warnings = count(findings, "error"), count(findings, "warning")
    return "\n".join([*lines, "", f"{_counted(errors, 'error')}, {_counted(warnings, 'warning')}", ""])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
