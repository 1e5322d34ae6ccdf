"""`groupgrad replay`: repeats a step of a run and shows that it has the same bits, or the first that differs."""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupgrad.apps.cli.command_parser import CommandParser, refuse
from groupgrad.apps.cli.sweep import in_folder
from groupgrad.imports import quick_imports

if TYPE_CHECKING:
    from groupgrad.apps.replay.run_records import RunRecords


def main(argv: Sequence[str]) -> int:
    """Repeats a step. Returns 0 for the same bits, 1 for a difference, 2 for a step that cannot be repeated."""
    arguments = parser().parse_args(argv)
    with quick_imports():
        from groupgrad.apps.replay.replaying import find_start, replay
        from groupgrad.apps.replay.run_records import RunRecords
        from groupgrad.apps.replay.wording import replay_report

    keep = None if arguments.keep is None else arguments.keep.resolve()
    try:
        records = RunRecords(Path(arguments.run).resolve(), arguments.run)
        find_start(records, arguments.step, arguments.row)  # what is wrong here is said before the model is loaded
        with _quiet(), in_folder((records.config.get("command") or {}).get("folder")):
            options = {"recorded_rewards": arguments.rewards == "recorded", "keep": keep}
            found = replay(_trainer_of(records), records, arguments.step, arguments.row, **options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        return refuse("replay", error)
    print(replay_report(found), end="")
    return 0 if found.is_same else 1


def _trainer_of(records: RunRecords) -> Any:
    """Builds the trainer of a run of `groupgrad train`, `sweep` or `demo` again, from the stored command line.

    ValueError for a run of a Python script; ValueError, ImportError or OSError for data, rewards or a model that are no
    longer there.
    """
    from groupgrad.apps.cli import demo, parsing, train
    from groupgrad.config.grpo_config import HIDDEN

    command = records.config.get("command")
    if not command:
        raise ValueError(
            f"{records.name} was not made by `groupgrad train`, `sweep` or `demo`, so its data, model and reward "
            "functions are not known here; replay it in Python, with a trainer that is made as its own was: "
            "`groupgrad.apps.replay.replay(trainer, run, step)`"
        )
    with tempfile.TemporaryDirectory(prefix="groupgrad-") as folder:
        if command.get("name") == "demo":
            return demo.trainer_of(records.path, command["argv"], folder)
        argv = [word for word in command["argv"] if word != "--dry-run"]
        content = dict(command.get("yaml") or {})
        # A variable whose value was hidden stays as the present environment has it.
        content["env"] = {name: value for name, value in (content.get("env") or {}).items() if value != HIDDEN}
        parsed = parsing.parse(argv, content=content)
        config = parsed.config
        config.output_dir = folder
        config.push_to_hub, config.report_to, config.log_completions_hub_repo = False, [], None
        return train.build(parsed)


@contextmanager
def _quiet() -> Iterator[None]:
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
groupgrad replay runs/math --step 137 --rewards recorded""",
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
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep the records of the replay in a new folder")
    return parser
