"""Rebuilds the trainer of a finished run, from the command line stored in its folder or by the user's own script."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from groupgrad.apps.cli import demo, parsing, train
from groupgrad.apps.cli.sweep import in_folder
from groupgrad.apps.replay.replaying import ReplayError
from groupgrad.apps.replay.run_records import RunRecords
from groupgrad.apps.sweep.store import ARMS, FILE
from groupgrad.config.grpo_config import HIDDEN
from groupgrad.run_folder import run_files


class _Done(BaseException):
    """Ends a script where it would have trained; no `except Exception` of the script holds it up.

    Its text, if any, is the reason for which there is nothing to replay with.
    """


def trainer_of(records: RunRecords, advice: str) -> Any:
    """Builds the trainer of a run of `groupgrad train`, `sweep` or `demo` again, from the stored command line.

    ReplayError, which ends with `advice`, for a run of a Python script; ValueError, ImportError or OSError for data,
    rewards or a model that are no longer there.
    """
    command = records.config.get("command")
    if not command:
        is_arm = sweep_folder(records) is not None
        origin = (
            "is an arm of a sweep that a Python script or an earlier release made"
            if is_arm
            else "was not made by `groupgrad train`"
        )
        raise ReplayError(
            f"{records.name} {origin}, so its data, model and reward functions are not known here; {advice}"
        )
    with tempfile.TemporaryDirectory(prefix="groupgrad-") as folder, in_folder(command.get("folder")):
        if command.get("name") == "demo":
            return _trainer_of_demo(records, command["argv"], folder)
        argv = [word for word in command["argv"] if word != "--dry-run"]
        content = dict(command.get("yaml") or {})
        # A variable whose value was hidden stays as the present environment has it.
        content["env"] = {name: value for name, value in (content.get("env") or {}).items() if value != HIDDEN}
        parsed = parsing.parse(argv, content=content)
        config = parsed.config
        config.output_dir = folder
        config.push_to_hub, config.report_to, config.log_completions_hub_repo = False, [], None
        return train.build(parsed)


def _trainer_of_demo(records: RunRecords, argv: Sequence[str], folder: str) -> Any:
    """The trainer of a run of `groupgrad demo`; the tiny model was warmed up and stored in the run's folder."""
    from groupgrad.apps.demo import pretrained, run

    base, options = records.path / run.BASE, demo.parser().parse_args(argv)
    options.tiny |= base.is_dir()  # runs of earlier releases, which had no other model
    options = demo.completed(options)
    options.output_dir = folder
    if not options.tiny:
        if (missing := pretrained.missing_because()) is not None:
            raise ReplayError(f"the model that {records.name} started from is not here: {missing}")
        return pretrained.make_trainer(options)
    if not base.is_dir():
        raise ReplayError(
            f"{records.name} has no {run.BASE}/, the model that it started from; run `groupgrad demo --tiny` again"
        )
    return run.make_trainer(options, str(base))


def sweep_folder(records: RunRecords) -> Path | None:
    """Returns the folder of the sweep that a run is an arm of; None for any other run."""
    arms = records.path.resolve().parent
    return arms.parent if arms.name == ARMS and (arms.parent / FILE).is_file() else None


def at_training_of(script: str, arguments: Sequence[str], records: RunRecords, act: Callable[[Any], None]) -> None:
    """Runs a script up to its call of `trainer.train()`, and calls `act(trainer)` in its place.

    In a script of a `Sweep` the call is `sweep.run()`, and the trainer is that of the arm in `records`. ReplayError for
    a script that does not exist, makes no such call, or has another sweep; its own errors are raised.
    """
    from groupgrad.apps.sweep.script import Sweep
    from groupgrad.trainer.hooks import Hooks

    if not Path(script).is_file():
        raise ReplayError(f"there is no script {script}; give the path of the one that made the run")
    original = Hooks.train

    def instead(trainer: Any, *_: Any, **__: Any) -> None:
        other = Path(trainer.args.output_dir).resolve()
        if other != records.path.resolve() and (other / run_files.CONFIG).is_file():
            raise _Done(
                f"{script} trains another run first, that of {other}, and {records.name} is to be replayed; give the "
                "script arguments with which it trains that one first, or replay in Python with its trainer"
            )
        with mock.patch.object(Hooks, "train", original):
            act(trainer)
        raise _Done

    def instead_of_sweep(sweep: Sweep) -> None:
        sweep_of_script, folder = sweep.folder.resolve(), sweep_folder(records)
        if sweep_of_script != folder:
            place = "no arm of a sweep" if folder is None else f"an arm of the sweep in {folder}"
            raise ReplayError(
                f"{script} is not the script that made {records.name}: its sweep is in {sweep_of_script}, and the run "
                f"is {place}; start it with the arguments and in the folder that the sweep had, or make the trainer in "
                "Python by `Sweep.trainer_of`"
            )
        with mock.patch.object(Hooks, "train", original):
            act(sweep.trainer_of(records.path.name))
        raise _Done

    path = [str(Path(script).resolve().parent), *sys.path]
    with (
        mock.patch.object(Hooks, "train", instead),
        mock.patch.object(Sweep, "run", instead_of_sweep),
        mock.patch.object(sys, "argv", [script, *arguments]),
        mock.patch.object(sys, "path", path),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except _Done as done:
            if done.args:
                raise ReplayError(str(done)) from None
            return
    raise ReplayError(f"{script} has ended without a call of trainer.train(), so there is no trainer to replay with")
