"""`groupgrad bisect`: finds the first step and number at which two runs differ."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from groupgrad.apps.cli.command_parser import CommandParser, refuse
from groupgrad.imports import quick_imports


def main(argv: Sequence[str]) -> int:
    """Compares two runs. Returns 0 if nothing differs, 1 for a difference, 2 for runs that cannot be compared."""
    arguments = parser().parse_args(argv)
    with quick_imports():
        from groupgrad.apps.replay.bisecting import bisect
        from groupgrad.apps.replay.run_records import RunRecords
        from groupgrad.apps.replay.wording import bisection_report

    try:
        found = bisect(*(RunRecords(Path(path).resolve(), path) for path in (arguments.first, arguments.second)))
    except (ValueError, OSError) as error:
        return refuse("bisect", error)
    print(bisection_report(found), end="")
    return 0 if found.first_step is None else 1


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "bisect",
        description="Find the first step and number at which two runs differ.",
        examples="groupgrad bisect runs/a runs/b",
    )
    parser.add_argument("first", metavar="A", help="output_dir of a run")
    parser.add_argument("second", metavar="B", help="output_dir of another run")
    return parser
