"""Makes the trainer of a finished run again: from the command line in its folder, or by the user's own script."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from groupgrad.cli import parsing, train
from groupgrad.replay.replaying import ReplayError
from groupgrad.replay.run_records import RunRecords


class _Done(BaseException):
    """Ends a script where it would have trained; no `except Exception` of the script holds it up."""


def trainer_of(records: RunRecords) -> Any:
    """The trainer of a run of `groupgrad train`, built anew from the stored command line.

    ReplayError for a run of another program; ValueError, ImportError or OSError for data, rewards or a model that are
    no longer there.
    """
    command = records.config.get("command")
    if not command:
        raise ReplayError(
            f"{records.name} was not made by `groupgrad train`, so its data, model and reward functions are not known "
            "here; give the script that made it: --script train.py"
        )
    with tempfile.TemporaryDirectory(prefix="groupgrad-") as folder, in_folder(records):
        argv = [word for word in command["argv"] if word != "--dry-run"]
        parsed = parsing.parse(argv, content=command.get("yaml"))
        config = parsed.config
        config.output_dir = folder
        config.push_to_hub, config.report_to, config.log_completions_hub_repo = False, [], None
        return train.build(parsed)


@contextmanager
def in_folder(records: RunRecords) -> Iterator[None]:
    """Context in the folder that relative paths of the run's command line belong to, if it is still there."""
    before, then = os.getcwd(), (records.config.get("command") or {}).get("folder", "")
    try:
        if os.path.isdir(then):
            os.chdir(then)
        yield
    finally:
        os.chdir(before)


def at_training_of(script: str, arguments: Sequence[str], act: Callable[[Any], None]) -> None:
    """Runs a script up to its call of `trainer.train()`, and calls `act(trainer)` in its place.

    ReplayError for a script that does not exist or makes no such call; its own errors are raised.
    """
    from groupgrad.trainer.training_run import TrainingRun

    if not Path(script).is_file():
        raise ReplayError(f"there is no script {script}; give the path of the one that made the run")
    original = TrainingRun.train

    def instead(trainer: Any, *_: Any, **__: Any) -> None:
        with mock.patch.object(TrainingRun, "train", original):
            act(trainer)
        raise _Done

    path = [str(Path(script).resolve().parent), *sys.path]
    with (
        mock.patch.object(TrainingRun, "train", instead),
        mock.patch.object(sys, "argv", [script, *arguments]),
        mock.patch.object(sys, "path", path),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except _Done:
            return
    raise ReplayError(f"{script} has ended without a call of trainer.train(), so there is no trainer to replay with")
