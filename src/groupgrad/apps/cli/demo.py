"""`groupgrad demo`: makes a small model, trains it with GRPO, and shows it before and after."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from groupgrad.apps.cli.command_parser import CommandParser
from groupgrad.imports import quick_imports


def main(argv: Sequence[str]) -> int:
    """Runs the demo. Returns 1 if the accuracies that it promises were missed."""
    options = parser().parse_args(argv)
    # Threads that spin while they wait slow a run down tenfold when other processes use the same cores. OpenMP reads
    # this when PyTorch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with quick_imports():
        from groupgrad.apps.cli.parsing import command_of
        from groupgrad.apps.demo.run import run

    # Keeps the order of text and bars when the output goes into a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    return run(options, {**command_of(argv, None), "name": "demo"})


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "demo",
        description="Make a small model, teach it a task by careless demonstrations, train it with GRPO, and show its "
        "answers before and after. It needs no download and no GPU, and takes a few minutes.",
        examples="groupgrad demo\ngroupgrad demo --seed 1 --output-dir runs/demo-1",
    )
    for flag, kind, default, text in (
        ("seed", int, 0, "model, data and sampling all follow from it"),
        ("output-dir", str, "runs/demo", "where everything is written"),
        ("warm-up-steps", int, 800, "supervised steps, 64 rows each"),
        ("grpo-steps", int, 200, "GRPO steps, 256 rows each"),
    ):
        parser.add_argument(f"--{flag}", type=kind, default=default, help=text)
    return parser
