"""Writes to standard output without failing if its reader has ended or its disk is full."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tqdm import tqdm

logger = logging.getLogger(__name__)

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
