"""Prints completion records as a table on the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from groupgrad.telemetry.render import cell_text, plain_text, visible

# Minimum characters of the Prompt and of the Completion column.
_MIN_TEXT = 16
_MAX_EXTRA = 24
_MAX_EXTRA_CHARS = 200
_PADDING = 3  # one border and two blanks a column


def print_table(
    records: Sequence[Mapping[str, Any]],
    rewards: Sequence[str],
    extras: Sequence[str],
    *,
    title: str,
    lead: str | None = None,
    console: Console | None = None,
) -> None:
    """Prints one row a record: Prompt, Completion, rewards and advantage with two decimals, then the extra columns.

    A column `lead` comes first and is never left out.

    If the terminal is too narrow for 16 characters of each text, extra columns are left out, last one first, and named
    in the caption; then the rewards share one column. Markup in texts is not interpreted, and control characters are
    made visible.
    """
    target = Console() if console is None else console
    numbers = {name: [_decimals(record.get(name)) for record in records] for name in rewards}
    numbers["Advantage"] = [_decimals(record.get("advantage")) for record in records]
    others = {name: [_extra(record.get(name)) for record in records] for name in extras}
    number_widths = {name: _widest([_header(name), *cells]) for name, cells in numbers.items()}
    extra_widths = {name: min(_widest([_header(name), *cells]), _MAX_EXTRA) for name, cells in others.items()}

    leading = [str(record[lead]) for record in records] if lead else []
    lead_width = _widest([_header(lead), *leading]) + _PADDING if lead else 0
    width = target.width - lead_width
    space = width - 1 - 2 * (_MIN_TEXT + _PADDING) - sum(number_widths.values()) - _PADDING * len(numbers)
    shared = space < 0 and len(rewards) > 1
    visible_extras = list(extras)
    while visible_extras and sum(extra_widths[name] + _PADDING for name in visible_extras) > space:
        visible_extras.pop()

    table = Table(title=Text(visible(title)), box=box.SQUARE, show_lines=True, expand=True)
    if lead:
        table.add_column(Text(_header(lead)), no_wrap=True, min_width=lead_width - _PADDING)
    table.add_column("Prompt", ratio=2, overflow="fold")
    table.add_column("Completion", ratio=3, overflow="fold")
    if shared:
        table.add_column("Scores", justify="left", overflow="fold", max_width=max(width - 2 * _MIN_TEXT - 10, 14))
    else:
        for name in numbers:
            table.add_column(Text(_header(name)), justify="right", no_wrap=True, min_width=number_widths[name])
    for name in visible_extras:
        table.add_column(Text(_header(name)), overflow="fold", max_width=_MAX_EXTRA, min_width=extra_widths[name])
    for row, record in enumerate(records):
        scores = [Text(cells[row]) for cells in numbers.values()]
        if shared:
            scores = [Text(visible("\n".join(f"{name} {cells[row]}" for name, cells in numbers.items())))]
        tail = [Text(others[name][row], overflow="fold") for name in visible_extras]
        head = [Text(visible(leading[row]))] if lead else []
        table.add_row(*head, cell_text(record.get("prompt")), cell_text(record.get("completion")), *scores, *tail)
    if len(visible_extras) < len(extras):
        hidden = ", ".join(visible(name) for name in extras[len(visible_extras) :])
        table.caption = Text(f"too narrow for: {hidden} (they are in the parquet file)")
    encoding = target.encoding or "ascii"
    if encoding.lower().replace("-", "").startswith("utf"):
        target.print(table)
        return
    with target.capture() as capture:
        target.print(table)
    target.file.write(capture.get().encode(encoding, errors="backslashreplace").decode(encoding))


def _widest(cells: Sequence[str]) -> int:
    return max(len(line) for cell in cells for line in cell.split("\n"))


def _header(name: str) -> str:
    """Breaks `name` at underscores and slashes into lines of about ten characters."""
    lines = re.findall(r".{4,9}?[_/\- ]|.{1,10}", visible(name).replace("\n", " "))
    return "\n".join(line for line in lines if line.strip()) or " "


def _decimals(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{float(value):.2f}"


def _extra(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    is_messages = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
    text = visible(plain_text(value) if is_messages else str(value))
    return text if len(text) <= _MAX_EXTRA_CHARS else text[: _MAX_EXTRA_CHARS - 3] + "..."
