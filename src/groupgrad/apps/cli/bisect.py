"""`groupgrad bisect`: finds the first step and number at which two runs differ."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from groupgrad.apps.cli.command_parser import CommandParser, refuse
from groupgrad.apps.cli.replay import quiet
from groupgrad.imports import quick_imports

_ADVICE = (
    "leave --replay out, or compare the runs in Python by `groupgrad.apps.replay.bisect` with functions that make "
    "their trainers"
)


def main(argv: Sequence[str]) -> int:
    """Compares two runs. Returns 0 if nothing differs, 1 for a difference, 2 for runs that cannot be compared."""
    arguments = parser().parse_args(argv)
    with quick_imports():
        from groupgrad.apps.cli.rebuilt import trainer_of
        from groupgrad.apps.replay.bisecting import bisect
        from groupgrad.apps.replay.run_records import RunRecords
        from groupgrad.apps.replay.wording import bisection_report

    try:
        first, second = (RunRecords(Path(path).resolve(), path) for path in (arguments.first, arguments.second))
        makers = [partial(trainer_of, run, _ADVICE) if arguments.replay else None for run in (first, second)]
        with quiet():
            found = bisect(first, second, make_first=makers[0], make_second=makers[1])
    except (ValueError, TypeError, ImportError, OSError) as error:
        return refuse("bisect", error)
    print(bisection_report(found), end="")
    return 0 if found.first_step is None else 1


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "bisect",
        description="Find the first step and number at which two runs differ.",
        examples="groupgrad bisect runs/a runs/b\ngroupgrad bisect runs/a runs/b --replay",
    )
    parser.add_argument("first", metavar="A", help="output_dir of a run")
    parser.add_argument("second", metavar="B", help="output_dir of another run")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="repeat both runs once, from the last checkpoint where they are the same to the first difference: finds "
        "the step where records leave several open, and which of the two repeats what it recorded",
    )
    return parser
