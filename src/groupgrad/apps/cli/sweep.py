"""`groupgrad sweep`: trains many configurations in turns, shows how they stand, and stops, resumes, clones or deletes
them."""

from __future__ import annotations

import argparse
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupgrad.apps.cli.command_parser import CommandParser, refuse
from groupgrad.apps.cli.yaml_files import read_setting, read_settings
from groupgrad.apps.sweep.commands import apply_commands, check_state
from groupgrad.apps.sweep.report import arms_in_turn, cost, steps_so_far, table
from groupgrad.apps.sweep.store import FILE, Store
from groupgrad.apps.sweep.sweep_plan import SweepPlan, merged, read_plan
from groupgrad.errors import OutputDirInUse
from groupgrad.imports import quick_imports
from groupgrad.run_folder.run_lock import is_trained, locked
from groupgrad.spelling import did_you_mean

ACTIONS = ("status", "stop", "resume", "clone", "delete")
_FORBIDDEN = ("resume_from_checkpoint", "output_dir", "push_to_hub", "hub_model_id")

_EXAMPLES = """\
groupgrad sweep sweep.yaml --dry-run
groupgrad sweep sweep.yaml
groupgrad sweep sweep.yaml --devices all
groupgrad sweep status runs/rates
groupgrad sweep stop runs/rates 3
groupgrad sweep clone runs/rates 3 --set learning_rate=2e-6 --from-weights
"""


def main(argv: Sequence[str]) -> int:
    """Runs a sweep or an action on one. Returns 0, 1 if an arm has failed, or 2 after a sentence that says what to
    change."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.what in ACTIONS:
            for flag, given in (("--dry-run", arguments.dry_run), ("--devices", arguments.devices)):
                if given:
                    raise ValueError(f"{flag} belongs to `groupgrad sweep FILE`, not to {arguments.what}")
            return _act(arguments)
        if arguments.folder is not None:
            others = f"; there are {', '.join(ACTIONS)}"
            hint = did_you_mean(arguments.what, ACTIONS, before="; ", otherwise=others)
            raise ValueError(f"there is no action {arguments.what!r}{hint}")
        if arguments.set or arguments.from_weights:
            raise ValueError("--set and --from-weights belong to clone; change the file to change the sweep")
        return _run(Path(arguments.what), arguments.devices, dry_run=arguments.dry_run)
    except (ValueError, TypeError, ImportError, OSError, OutputDirInUse) as error:
        return refuse("sweep", error)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "sweep",
        usage="groupgrad sweep FILE [--devices N|all|INDEX,INDEX] [--dry-run]\n       groupgrad sweep status DIR\n"
        "       groupgrad sweep {stop,resume,clone,delete} DIR ARM [--set KEY=VALUE ...] [--from-weights]",
        description="Train many configurations in turns, each as if it were trained alone, and compare them. An ARM is "
        "its number or its name, as `status` shows them. An interrupted sweep goes on when it is started again.",
        examples=_EXAMPLES,
    )
    parser.add_argument("what", metavar="FILE", help="YAML file of the sweep, or one of " + ", ".join(ACTIONS))
    parser.add_argument("folder", metavar="DIR", nargs="?", help="output_dir of the sweep, for an action")
    parser.add_argument("arm", metavar="ARM", nargs="?", help="number or name of an arm, for an action but status")
    parser.add_argument("--dry-run", action="store_true", help="check all arms and list them, but train nothing")
    parser.add_argument(
        "--devices",
        metavar="N",
        help="spread the arms over N GPUs, over `all`, or over those named (0,2), with a worker process for each; on a "
        "CPU over N processes (default: what the file says, or this process alone)",
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", help="clone: a setting of the new arm; repeatable"
    )
    parser.add_argument("--from-weights", action="store_true", help="clone: begin with the present weights of ARM")
    return parser


# ------------------------------------------------------------------------------------------------------------ a sweep


def _run(path: Path, devices: str | None, *, dry_run: bool) -> int:
    content, base, folder, environment = read_file(path)
    content |= {} if devices is None else {"devices": devices}
    plan = read_plan(content, base)
    with quick_imports():
        from groupgrad.apps.cli.sweep_arms import CommandLineArms
        from groupgrad.apps.sweep.device_workers import find_devices
        from groupgrad.apps.sweep.sweeper import Sweeper

    factory = CommandLineArms(environment)
    if dry_run:
        names = [device.name for device in find_devices(plan.devices, on_cpu=bool(base.get("use_cpu")))]
        return _describe(plan, factory.check, names)
    logging.getLogger("groupgrad.apps.sweep").setLevel(logging.INFO)
    if not logging.getLogger().handlers:
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
    sweeper = Sweeper(plan, folder, factory)
    sweeper.prepare({**content, "base": base, "kind": "command line"})
    sweeper.store.set_fact("started_in", os.getcwd())
    num_failed = sweeper.run()
    print(status_text(sweeper.store))
    return 1 if num_failed else 0


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any], Path, dict[str, str]]:
    """Reads a sweep's YAML file: its keys, the settings of its base, its folder, and the variables that it exports.

    ValueError if they cannot work.
    """
    content = read_settings(path, "the sweep")
    base, origin = content.pop("base", None), str(path)
    if isinstance(base, str):
        origin = str(path.parent / base)
        base = read_settings(origin, "base")
    if not isinstance(base, dict) or not base:
        raise ValueError(f"{path}: base={base!r}; set it to settings of `groupgrad train`, or to a YAML file of them")
    environment = {str(name): str(value) for name, value in (base.pop("env", None) or {}).items()}
    os.environ.update(environment)
    base = {str(key).replace("-", "_"): value for key, value in base.items()}
    folder = content.pop("output_dir", None) or base.pop("output_dir", None)
    base.pop("output_dir", None)
    if not folder:
        raise ValueError(f"{path}: output_dir is not set; set it to the folder of the sweep")
    given = [*base, *(content.get("vary") or ()), *(key for arm in content.get("arms") or () for key in arm)]
    for key in _FORBIDDEN:
        if key in given:
            raise ValueError(f"{origin}: {key} is set, but the sweep resumes and places its arms itself; remove it")
    return content, base, Path(folder), environment


def _describe(plan: SweepPlan, check: Callable[[dict[str, Any]], None], devices: Sequence[str]) -> int:
    num_bad = 0
    for place, changes in enumerate(plan.first_arms(), start=1):
        problem = ""
        try:
            check(merged(plan.base, changes))
        except (ValueError, TypeError, ImportError) as error:
            problem, num_bad = f"  cannot work: {error}", num_bad + 1
        print(f"{plan.name_of(place, changes)}{problem}")
    if devices:
        print(f"\nEach of these would train arms in a worker process: {', '.join(devices)}")
    print("\nNothing was trained.")
    return 2 if num_bad else 0


# ------------------------------------------------------------------------------------------------------------ actions


def _act(arguments: argparse.Namespace) -> int:
    if arguments.folder is None:
        raise ValueError(f"{arguments.what} needs the folder of a sweep: groupgrad sweep {arguments.what} DIR")
    store = Store(arguments.folder)
    if arguments.what == "status":
        print(status_text(store))
        return 0
    store = Store(store.folder.absolute())  # a clone is checked in another folder
    if arguments.arm is None:
        raise ValueError(f"{arguments.what} needs an arm: groupgrad sweep {arguments.what} {arguments.folder} ARM")
    if (arguments.set or arguments.from_weights) and arguments.what != "clone":
        raise ValueError(f"--set and --from-weights belong to clone, not to {arguments.what}")
    arm = store.find(arguments.arm)
    check_state(arguments.what, arm)
    changes = _changes(arguments.set or [])
    is_command_line = (store.fact("plan") or {}).get("kind") == "command line"
    if arguments.what == "clone":
        if not changes and not arguments.from_weights:
            raise ValueError("a clone without changes is the same arm; give --set KEY=VALUE or --from-weights")
        if is_command_line:  # a script's own process checks its clones
            with quick_imports():
                from groupgrad.apps.cli.sweep_arms import CommandLineArms

            with in_folder(store.fact("started_in")):
                CommandLineArms().check(merged(store.fact("base"), {**arm.changes, **changes}))
    command = store.queue(arguments.what, arm.id, changes, arguments.from_weights)
    if is_command_line and _take_at_once(store, command):
        state, message = store.command_state(command)
        if state == "refused":
            raise ValueError(message)
        print(f"{arguments.what} of {arm.name}: done{f', the new arm is {message}' if message else ''}")
        if arguments.what in ("resume", "clone"):
            print("no process trains this sweep now; start it with `groupgrad sweep FILE`")
    elif not is_command_line and not is_trained(store.folder):
        print(f"{arguments.what} of {arm.name}: queued; no process trains this sweep now, its script takes it when run")
    else:
        print(f"{arguments.what} of {arm.name}: queued; the sweep takes it after the present step")
    return 0


def _changes(settings: Sequence[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for setting in settings:
        key, value = read_setting(setting)
        if key.split(".")[0] in _FORBIDDEN:
            raise ValueError(f"--set {setting}: the sweep resumes and places its arms itself")
        changes[key.replace("-", "_")] = value
    return changes


@contextmanager
def in_folder(folder: str | None) -> Iterator[None]:
    """Works in the folder in which a command was started, if it is still there: settings name paths from it."""
    here = os.getcwd()
    if folder and os.path.isdir(folder):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


def _take_at_once(store: Store, command_id: int) -> bool:
    """Applies the waiting commands in this process, unless another one trains the sweep, which returns False.

    Refusals of commands other than `command_id` are printed.
    """

    def sweep() -> tuple[SweepPlan, Any]:
        with quick_imports():
            from groupgrad.apps.cli.sweep_arms import CommandLineArms

        description = store.fact("plan")
        content = {key: value for key, value in description.items() if key not in ("base", "kind")}
        return read_plan(content, description["base"]), CommandLineArms()

    try:
        with locked(store.folder), in_folder(store.fact("started_in")):
            refused = apply_commands(store, sweep)
    except OutputDirInUse:
        return False
    for command, refusal in refused.items():
        if command != command_id:
            print(refusal, file=sys.stderr)
    return True


def status_text(store: Store) -> str:
    """Returns the arms as a table, the best one first, with what the sweep has cost."""
    shown, total = table(store), cost(store)
    metric, rows = shown["metric"], shown["arms"]
    width = max([len(row["name"]) for row in rows] + [4])
    lines = [
        f"{'':>3}  {'arm':<{width}}  {'state':<17} {'steps':>11}  {'compared':>11}  {metric:>8}  behind the best by"
    ]
    for row in rows:
        steps = f"{row['step']}/{row['max_steps'] or '?'}" if row["step"] or row["max_steps"] else ""
        reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
        compared = "-".join(map(str, row["compared"] or ()))
        reason = f"  {row['reason'].splitlines()[0][:120]}" if row["state"] == "failed" else ""
        lines.append(
            f"{row['id']:>3}  {row['name']:<{width}}  {row['shown_state']:<17} {steps:>11}  {compared:>11}  "
            f"{reward:>8}  {row['behind']}{reason}".rstrip()
        )
    share = math.floor(100 * total.steps / total.all_steps + 0.5) if total.all_steps else 0  # halves up, as on the page
    lines += [
        *(["", shown["note"]] if shown["note"] else []),
        "",
        f"{total.steps:,} steps, {share}% of training all arms to their end; switching took "
        f"{total.switch_share:.1%} of {total.train_s + total.switch_s:,.0f} s",
        f"{metric} is the mean of the steps in `compared`, those of its rung for an arm that was dropped there",
        f"groupgrad view {store.folder} shows the runs; {store.folder / FILE} has the comparisons",
    ]
    return "\n".join(lines)


TIMEOUT_S = 300
"""Longest time of a command that needs a process, most of which is the import of torch."""
MAX_COMMANDS = 20
"""Commands that the page lists."""


class CommandLinePanel:
    """The arms of a sweep in a folder. Its commands are those of `groupgrad sweep`, each in a process of its own: they
    follow the same rules, and the page's process imports neither torch nor reward functions.

    ValueError or sqlite3.Error if the folder holds no sweep that can be read.
    """

    def __init__(self, folder: Path):
        self.path, self.name, self._store = folder, folder.resolve().name, Store(folder)
        self._known: tuple[Any, dict[str, Any]] | None = None

    def table(self) -> dict[str, Any]:
        """The arms, the best one first, what the sweep has cost, and the last commands."""
        written = [path.stat() for path in self._store.folder.glob(f"{self._store.path.name}*")]
        steps, in_turn = steps_so_far(self._store), arms_in_turn(self._store)
        version = steps, in_turn, [(status.st_mtime_ns, status.st_size) for status in written]
        if self._known is None or self._known[0] != version:
            commands = [{**given._asdict(), "arm": given.name} for given in self._store.commands(MAX_COMMANDS)]
            shown = {"name": self.name, "path": str(self.path), **table(self._store), "commands": commands}
            self._known = version, shown
        return self._known[1]

    def act(self, kind: str, arm: int, settings: Sequence[str], *, from_weights: bool) -> str:
        """Gives a command and returns the message for the user. ValueError, with the reason, if it is refused."""
        flags = [f"--set={setting}" for setting in settings] + (["--from-weights"] if from_weights else [])
        command = [sys.executable, "-m", "groupgrad", "sweep", kind, str(self.path.absolute()), str(arm), *flags]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"the command has not ended within {TIMEOUT_S} s and was given up") from None
        if done.returncode:
            said = done.stderr.partition("groupgrad sweep: error: ")[2].partition("\n(GROUPGRAD_TRACEBACK")[0]
            raise ValueError(said or done.stderr[-500:] or f"exit code {done.returncode}")
        return done.stdout.strip()
