"""`groupgrad replay`: repeats a step of a run and shows that it has the same bits, or the first that differs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupgrad.apps.cli.command_parser import CommandParser, refuse
from groupgrad.imports import quick_imports


def main(argv: Sequence[str]) -> int:
    """Repeats a step. Returns 0 for the same bits, 1 for a difference, 2 for a step that cannot be repeated."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    arguments, of_script = parser().parse_args(words[:place]), words[place + 1 :]
    with quick_imports():
        from groupgrad.apps.cli.rebuilt import at_training_of, trainer_of
        from groupgrad.apps.cli.sweep import in_folder
        from groupgrad.apps.replay.replaying import Replay, find_start, replay
        from groupgrad.apps.replay.run_records import RunRecords
        from groupgrad.apps.replay.wording import replay_report

    found: list[Replay] = []

    def act(trainer: Any) -> None:
        is_recorded = arguments.rewards == "recorded"
        found.append(replay(trainer, records, arguments.step, arguments.row, recorded_rewards=is_recorded, keep=keep))

    keep = None if arguments.keep is None else arguments.keep.resolve()
    try:
        records = RunRecords(Path(arguments.run).resolve(), arguments.run)
        find_start(records, arguments.step, arguments.row)  # what is wrong here is said before the model is loaded
        with quiet():
            if arguments.script is not None:
                at_training_of(arguments.script, of_script, records, act)
            else:
                with in_folder((records.config.get("command") or {}).get("folder")):
                    act(trainer_of(records, "give the script that made it: --script train.py"))
    except (ValueError, TypeError, ImportError, OSError) as error:
        return refuse("replay", error)
    print(replay_report(found[0]), end="")
    return 0 if found[0].is_same else 1


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out the bars and hints of loading and training, and has each repeated step named on stderr."""
    from transformers.utils import logging as transformers_logging

    package, steps = logging.getLogger("groupgrad"), logging.getLogger("groupgrad.apps.replay")
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled(), package.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    package.setLevel(logging.ERROR)
    steps.setLevel(logging.INFO)
    shown = logging.StreamHandler()
    steps.addHandler(shown)
    steps.propagate = False
    try:
        yield
    finally:
        steps.removeHandler(shown)
        steps.propagate = True
        steps.setLevel(logging.NOTSET)
        package.setLevel(before[2])
        transformers_logging.set_verbosity(before[0])
        if before[1]:
            transformers_logging.enable_progress_bar()


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "replay",
        description="Sample and train a step of a run again, from the nearest checkpoint, and compare every number "
        "with what the run recorded. Nothing is written into the run's folder.",
        examples="""\
groupgrad replay runs/math --step 137 --row 5
groupgrad replay runs/math --step 137 --rewards recorded
groupgrad replay out --step 20 --script train.py -- --learning-rate 1e-5""",
    )
    parser.add_argument("run", metavar="RUN", help="output_dir of a run")
    parser.add_argument("--step", type=int, required=True, help="step to repeat")
    parser.add_argument("--row", type=int, help="also show this row of the step")
    parser.add_argument(
        "--rewards",
        choices=["call", "recorded"],
        default="call",
        help="call the reward functions again (default), or take the rewards that the run has stored, where a judge or "
        "a service would answer otherwise",
    )
    parser.add_argument(
        "--script",
        metavar="FILE",
        help="Python script that made the run, if it was none of `groupgrad train`, `sweep` and `demo`; its arguments "
        "follow after --",
    )
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep the records of the replay in a new folder")
    return parser
