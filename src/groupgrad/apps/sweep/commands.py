"""Checks and applies the commands that users give to the arms of a sweep.

Only a clone needs the trainer's rules, and torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from groupgrad.apps.sweep.store import DELETED, DONE, STOPPED, WAITING, Arm, Command, Store
from groupgrad.apps.sweep.sweep_plan import SweepPlan, arm_settings

if TYPE_CHECKING:
    from groupgrad.apps.sweep.factory import ArmFactory

_STATES_AFTER = {
    "stop": (STOPPED, "stopped by a command"),
    "resume": (WAITING, ""),
    "delete": (DELETED, "deleted by a command"),
}
"""Command -> the state of its arm afterwards, and the reason for it."""


def check_state(kind: str, arm: Arm) -> None:
    """ValueError if an arm's state does not allow a command."""
    obstacle = None
    if arm.state == DELETED:
        obstacle = f"there is nothing to {kind}"
    elif kind == "stop" and arm.state != WAITING:
        obstacle = f"only an arm that is {WAITING} can be stopped"
    elif kind == "resume" and arm.state in (WAITING, DONE):
        obstacle = "there is nothing to resume"
    if obstacle is not None:
        raise ValueError(f"arm {arm.name} is {arm.state}, {obstacle}")


def apply_commands(
    store: Store,
    sweep: Callable[[], tuple[SweepPlan, ArmFactory]],
    busy: Collection[int] = (),
) -> dict[int, str]:
    """Applies the queued commands, except those for arms that are `busy` in a turn.

    Args:
        store: the sweep's store, whose folder is locked by this process.
        sweep: returns the plan and the factory, by which the settings of a clone are checked.
        busy: numbers of arms.

    Returns:
        Number of each command that was refused -> why.
    """
    refused: dict[int, str] = {}
    for command in [command for command in store.queued() if command.arm not in busy]:
        arm = next((arm for arm in store.arms() if arm.id == command.arm), None)
        if arm is None:
            store.take(command, refused=True, message="the arm was deleted")
            continue
        try:
            check_state(command.kind, arm)
            if command.kind == "clone":
                _clone(store, command, arm, *sweep())
                continue
            if command.kind == "delete":
                shutil.rmtree(store.folder_of(arm), ignore_errors=True)
            store.take(command, state=_STATES_AFTER[command.kind])
        except (ValueError, TypeError, OSError) as error:
            refused[command.id] = f"{command.kind} of arm {arm.name} was refused: {error}"
            store.take(command, refused=True, message=str(error))
    return refused


def _clone(store: Store, command: Command, arm: Arm, plan: SweepPlan, factory: ArmFactory) -> None:
    changes = {**arm.changes, **command.changes}
    name = plan.name_of(store.num_arms() + 1, changes)
    clone = replace(arm, name=name, changes=changes, weights_step=None)
    if command.from_weights:
        clone = replace(clone, name=f"{name}-from={arm.id:02d}", weights_step=arm.step)
    factory.check(arm_settings(plan, store, factory, clone))
    if command.from_weights:
        _copy_weights(store.folder_of(arm), arm.step, store.folder_of(clone) / "start")
    store.take(command, clone=(clone.name, arm.cohort, changes, clone.weights_step), message=clone.name)


def _copy_weights(folder: Path, step: int, start: Path) -> None:
    """Copies model and tokenizer of the last checkpoint of a run, or of the finished run. ValueError without one."""
    checkpoint = folder / f"checkpoint-{step}"
    source = checkpoint if checkpoint.is_dir() else folder
    if not step or not any(source.glob("*.safetensors")):
        raise ValueError(f"{folder} has no weights yet: the arm has made {step} steps; clone it after its first turn")
    kept = [path for path in source.iterdir() if path.is_file() and path.suffix in (".safetensors", ".json", ".jinja")]
    kept += [path for path in source.iterdir() if path.name in ("merges.txt", "vocab.txt", "tokenizer.model")]
    shutil.rmtree(start, ignore_errors=True)
    start.mkdir(parents=True)
    for path in kept:
        if path.name != "trainer_state.json":
            shutil.copy2(path, start / path.name)
