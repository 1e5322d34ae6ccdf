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

    A column `lead` comes first. If the terminal is too narrow for 24 characters of each text, one column has all
    numbers and values, a line each with its name. Markup in texts is not interpreted, and control characters are made
    visible.
    """
    target = Console() if console is None else console
    leading = {lead: [str(record[lead]) for record in records]} if lead else {}
    numbers = {name: [_decimals(record.get(name)) for record in records] for name in rewards}
    numbers["Advantage"] = [_decimals(record.get("advantage")) for record in records]
    others = {name: [_extra(record.get(name)) for record in records] for name in extras}
    widths = {
        name: min(_widest([_header(name), *cells]), _MAX_EXTRA)
        for name, cells in {**leading, **numbers, **others}.items()
    }
    if sum(widths.values()) + _PADDING * (len(widths) + 2) + 1 > target.width - 2 * _MIN_TEXT:
        scores = _lines({**numbers, **others})
        numbers, others = {}, {"Scores": scores}
        widths["Scores"] = min(_widest(scores), target.width // 2)

    table = Table(title=Text(visible(title)), box=box.SQUARE, show_lines=True, expand=True)
    for name in leading:
        table.add_column(Text(_header(name)), no_wrap=True, min_width=widths[name])
    table.add_column("Prompt", ratio=2, overflow="fold")
    table.add_column("Completion", ratio=3, overflow="fold")
    for name in numbers:
        table.add_column(Text(_header(name)), justify="right", no_wrap=True, min_width=widths[name])
    for name in others:
        table.add_column(Text(_header(name)), overflow="fold", max_width=widths[name], min_width=widths[name])
    for row, record in enumerate(records):
        head = [Text(visible(cells[row])) for cells in leading.values()]
        tail = [Text(cells[row]) for cells in (*numbers.values(), *others.values())]
        table.add_row(*head, cell_text(record.get("prompt")), cell_text(record.get("completion")), *tail)
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


def _lines(values: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a text a row: a line `name value` for each value, of which the first 24 characters are shown."""
    names = {name: visible(name).replace("\n", " ") for name in values}
    padded = _widest([*names.values()])
    cells = [[cell.replace("\n", " ")[:_MAX_EXTRA] for cell in row] for row in zip(*values.values())]
    return ["\n".join(f"{name:<{padded}} {cell}" for name, cell in zip(names.values(), row)) for row in cells]


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
