"""Prints on standard output: single lines, and completions as a table. Output that fails ends no run."""

from __future__ import annotations

import logging
import math
import os
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

_MAX_EXTRA = 24
"""Characters of a value that are shown."""

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
    """Prints one row a record: Prompt, Completion, and in one column rewards and advantage (two decimals) and extras.

    A column `lead` comes first. Markup in texts is not interpreted, and control characters are made visible.
    """
    target = Console() if console is None else console
    names = {name: visible(name).replace("\n", " ") for name in (*rewards, "advantage", *extras)}
    width = max(len(name) for name in names.values())

    def scores(record: Mapping[str, Any]) -> str:
        cells = {name: _decimals(record.get(name)) for name in (*rewards, "advantage")}
        cells |= {name: _extra(record.get(name)) for name in extras}
        lines = {names[name]: cell.replace("\n", " ")[:_MAX_EXTRA] for name, cell in cells.items()}
        return "\n".join(f"{name:<{width}} {cell}" for name, cell in lines.items())

    table = Table(title=Text(visible(title)), box=box.SQUARE, show_lines=True, expand=True)
    if lead:
        table.add_column(Text(visible(lead)), no_wrap=True)
    table.add_column("Prompt", ratio=2, overflow="fold")
    table.add_column("Completion", ratio=3, overflow="fold")
    table.add_column("Scores", overflow="fold", max_width=max(target.width // 2, 24))
    for record in records:
        head = [Text(visible(str(record[lead])))] if lead else []
        texts = cell_text(record.get("prompt")), cell_text(record.get("completion"))
        table.add_row(*head, *texts, Text(scores(record)))
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


def _decimals(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{float(value):.2f}"


def _extra(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    is_messages = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
    return visible(plain_text(value) if is_messages else str(value))
