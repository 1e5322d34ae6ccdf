"""The completions table that is printed on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from groupgrad.telemetry.render import cell_text, plain_text, visible

# Characters that each of Prompt and Completion must keep for text to stay readable.
_MIN_TEXT = 16
_MAX_EXTRA = 24
_HEADER_WIDTH = 10
_PADDING = 3  # one border and two blanks a column


@dataclass(slots=True, frozen=True)
class Columns:
    """Which keys of a record are what."""

    rewards: list[str]
    """Reward functions, in order."""
    extras: list[str]
    """Everything else that follows the advantage."""


def print_table(
    records: Sequence[Mapping[str, Any]], columns: Columns, *, title: str, console: Console | None = None
) -> None:
    """Print one row a record: Prompt, Completion, each reward and the advantage with two decimals, then the extras.

    Where the terminal is too narrow for all of them, first the extra columns go (the caption names them), then the
    rewards share one column, so that the two texts keep at least 16 characters each. Text is shown as it is: no markup
    is interpreted and control characters are made visible.
    """
    target = Console() if console is None else console
    table = build_table(records, columns, title=title, width=target.width)
    encoding = target.encoding or "ascii"
    if encoding.lower().replace("-", "").startswith("utf"):
        target.print(table)
        return
    with target.capture() as capture:
        target.print(table)
    target.file.write(capture.get().encode(encoding, errors="backslashreplace").decode(encoding))


def build_table(records: Sequence[Mapping[str, Any]], columns: Columns, *, title: str, width: int) -> Table:
    """The rich table of `print_table`, laid out for `width` terminal columns."""
    rewards, extras = columns.rewards, columns.extras
    numbers = _numbers_width([*rewards, "Advantage"], records)
    shown = list(extras)
    while shown:
        others = sum(_extra_width(name, records) + _PADDING for name in shown)
        if _left_for_text(width, numbers + others) >= 2 * _MIN_TEXT:
            break
        shown.pop()
    merged = _left_for_text(width, numbers) < 2 * _MIN_TEXT and len(rewards) > 1

    table = Table(title=Text(visible(title)), box=box.SQUARE, show_lines=True, expand=True)
    table.add_column("Prompt", ratio=2, overflow="fold")
    table.add_column("Completion", ratio=3, overflow="fold")
    if merged:
        table.add_column("Scores", justify="left", overflow="fold", max_width=max(width - 2 * _MIN_TEXT - 10, 14))
    else:
        for name in [*rewards, "Advantage"]:
            table.add_column(_header(name), justify="right", no_wrap=True, min_width=_number_width(name, records))
    for name in shown:
        table.add_column(_header(name), overflow="fold", max_width=_MAX_EXTRA, min_width=_extra_width(name, records))
    for record in records:
        scores = [*(_decimals(record.get(name)) for name in rewards), _decimals(record.get("advantage"))]
        if merged:
            lines = [f"{name} {score}" for name, score in zip([*rewards, "Advantage"], scores)]
            middle = [Text(visible("\n".join(lines)))]
        else:
            middle = [Text(score) for score in scores]
        tail = [Text(_extra(record.get(name)), overflow="fold") for name in shown]
        table.add_row(cell_text(record.get("prompt")), cell_text(record.get("completion")), *middle, *tail)
    if len(shown) < len(extras):
        hidden = ", ".join(visible(name) for name in extras[len(shown) :])
        table.caption = Text(f"too narrow for: {hidden} (they are in the parquet file)")
    return table


def _left_for_text(width: int, others: int) -> int:
    return width - others - 2 * _PADDING - 1


def _numbers_width(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> int:
    return sum(_number_width(name, records) + _PADDING for name in names)


def _number_width(name: str, records: Sequence[Mapping[str, Any]]) -> int:
    key = "advantage" if name == "Advantage" else name
    widest = max((len(_decimals(record.get(key))) for record in records), default=4)
    return max(widest, *(len(line) for line in _header(name).plain.split("\n")))


def _extra_width(name: str, records: Sequence[Mapping[str, Any]]) -> int:
    widest = max((len(line) for record in records for line in _extra(record.get(name)).split("\n")), default=4)
    header = max(len(line) for line in _header(name).plain.split("\n"))
    return min(max(widest, header), _MAX_EXTRA)


def _header(name: str) -> Text:
    """`name` broken at underscores and slashes into lines of about ten characters."""
    lines = [""]
    for character in visible(name).replace("\n", " "):
        lines[-1] += character
        if len(lines[-1]) >= _HEADER_WIDTH or (character in "_/- " and len(lines[-1]) >= _HEADER_WIDTH // 2):
            lines.append("")
    return Text("\n".join(line for line in lines if line.strip()) or " ")


def _decimals(value: Any) -> str:
    if value is None:
        return "-"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return visible(str(value))
    return "-" if math.isnan(number) else f"{number:.2f}"


def _extra(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    is_messages = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
    text = visible(plain_text(value) if is_messages else str(value))
    return text if len(text) <= 200 else text[:197] + "..."
