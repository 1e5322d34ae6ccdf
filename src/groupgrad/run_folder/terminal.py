"""Prints on standard output: single lines, and completions as a table. Output that fails ends no run."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from groupgrad.run_folder.render import cell_text, plain_text, visible

logger = logging.getLogger(__name__)

_MIN_TEXT = 24
"""Characters that the Prompt and the Completion column have at least beside a column for each number."""
_LEAST_TEXT = 16
"""The same beside one column of all numbers."""
_MAX_EXTRA = 24
_MAX_EXTRA_CHARS = 200
_PADDING = 3  # one border and two blanks a column

_failures: list[str] = []
"""Why standard output could not be written, once; a warning has said so."""


@contextmanager
def output_may_fail() -> Iterator[None]:
    """Context in which standard output that cannot be written is one warning in a process, not an error.

    It cannot be written if it is closed, if its reader has ended (`| head`), or if it is a file on a full disk. The
    rest of the block is then skipped. Once the reader has ended, later output is discarded, so neither reward functions
    that print nor Python's exit raise.
    """
    try:
        yield
    except (OSError, ValueError, SystemExit) as error:
        # Streams raise ValueError if they are closed, and rich SystemExit from BrokenPipeError.
        is_of_rich = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
        if not (isinstance(error, OSError) or is_of_rich or "closed file" in str(error)):
            raise
        if is_of_rich or isinstance(error, BrokenPipeError):
            _discard_output()
        if not _failures:
            _failures.append(str(error.__context__ if is_of_rich else error))
            logger.warning(
                "standard output cannot be written (%s): the run goes on without its lines there; metrics.jsonl in "
                "output_dir has the metrics",
                _failures[0],
            )


def write_line(line: str) -> None:
    """Writes a line above the progress bars, if standard output can be written."""
    if sys.stdout is not None:
        with output_may_fail():
            tqdm.write(line, file=sys.stdout)


def _discard_output() -> None:
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


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

    If the terminal is too narrow for 24 characters of each text, one column has the rewards, the advantage and the
    short extra values, a line each with its name. Of long extra values those are left out, last one first, for which 16
    characters of each text do not remain, and the caption names them. Markup in texts is not interpreted, and control
    characters are made visible.
    """
    target = Console() if console is None else console
    numbers = {name: [_decimals(record.get(name)) for record in records] for name in rewards}
    numbers["Advantage"] = [_decimals(record.get("advantage")) for record in records]
    others = {name: [_extra(record.get(name)) for record in records] for name in extras}
    extra_widths = {name: min(_widest([_header(name), *cells]), _MAX_EXTRA) for name, cells in others.items()}
    leading = [str(record[lead]) for record in records] if lead else []
    lead_width = _widest([_header(lead), *leading]) + _PADDING if lead else 0
    width = target.width - lead_width - 1 - 2 * _PADDING
    number_widths = [_widest([_header(name), *cells]) for name, cells in numbers.items()]
    all_widths = [*number_widths, *extra_widths.values()]
    shared: list[str] = []
    hidden: list[str] = []
    if sum(all_widths) + _PADDING * len(all_widths) > width - 2 * _MIN_TEXT:
        short = {name for name, cells in others.items() if all(len(cell) <= _MAX_EXTRA for cell in cells)}
        scores = {**numbers, **{name: cells for name, cells in others.items() if name in short}}
        shared = _lines(scores, most=max(width - 2 * _LEAST_TEXT - _PADDING, 14))
        others = {name: cells for name, cells in others.items() if name not in short}
        width -= _widest(shared) + _PADDING
        while others and sum(extra_widths[name] + _PADDING for name in others) > width - 2 * _LEAST_TEXT:
            hidden.insert(0, others.popitem()[0])

    table = Table(title=Text(visible(title)), box=box.SQUARE, show_lines=True, expand=True)
    if lead:
        table.add_column(Text(_header(lead)), no_wrap=True, min_width=lead_width - _PADDING)
    table.add_column("Prompt", ratio=2, overflow="fold")
    table.add_column("Completion", ratio=3, overflow="fold")
    if shared:
        table.add_column("Scores", overflow="fold", min_width=_widest(shared))
    else:
        for name, least in zip(numbers, number_widths):
            table.add_column(Text(_header(name)), justify="right", no_wrap=True, min_width=least)
    for name in others:
        table.add_column(Text(_header(name)), overflow="fold", max_width=_MAX_EXTRA, min_width=extra_widths[name])
    for row, record in enumerate(records):
        middle = [Text(shared[row])] if shared else [Text(cells[row]) for cells in numbers.values()]
        tail = [Text(cells[row], overflow="fold") for cells in others.values()]
        head = [Text(visible(leading[row]))] if lead else []
        table.add_row(*head, cell_text(record.get("prompt")), cell_text(record.get("completion")), *middle, *tail)
    if hidden:
        table.caption = Text(f"too narrow for: {', '.join(map(visible, hidden))} (they are in the parquet file)")
    _print(target, table)


def _print(target: Console, table: Table) -> None:
    """Prints a table; characters that the terminal's encoding lacks are escaped."""
    encoding = target.encoding or "ascii"
    if encoding.lower().replace("-", "").startswith("utf"):
        target.print(table)
        return
    with target.capture() as capture:
        target.print(table)
    target.file.write(capture.get().encode(encoding, errors="backslashreplace").decode(encoding))


def _lines(values: Mapping[str, Sequence[str]], most: int) -> list[str]:
    """Returns a text a row: a line `name value` for each value. Names are padded if all lines then fit in `most`.

    A name whose line would be longer stands above its value.
    """
    names = {name: visible(name).replace("\n", " ") for name in values}
    padded = _widest([*names.values()])
    if padded + 1 + max(map(_widest, values.values())) > most:
        padded = 0
    rows = []
    for row in range(len(next(iter(values.values())))):
        lines: list[str] = []
        for name, shown in names.items():
            line = f"{shown:<{padded}} {values[name][row]}"
            parts = [shown[start : start + most] for start in range(0, len(shown), most)]
            lines += [line] if len(line) <= most else [*parts, values[name][row]]
        rows.append("\n".join(lines))
    return rows


def _widest(cells: Sequence[str]) -> int:
    return max((len(line) for cell in cells for line in cell.split("\n")), default=0)


def _header(name: str) -> str:
    """Breaks `name` at underscores and slashes into lines of at most 16 characters."""
    lines = re.findall(r".{4,15}?[_/\- ]|.{1,16}", visible(name).replace("\n", " "))
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
