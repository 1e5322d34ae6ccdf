"""Starts `groupgrad train`, `check` or `eval` on several processes by `accelerate launch`.

The process that starts them imports neither transformers nor the trainer, and torch only to count GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from groupgrad.apps.cli.command_parser import refuse
from groupgrad.spelling import did_you_mean

PROFILES: dict[str, Path] = {path.stem: path for path in sorted((Path(__file__).parent / "profiles").glob("*.yaml"))}
"""Name of a profile -> accelerate's configuration file."""
DEFAULT_PROFILE = "ddp"
"""Profile of `--num-processes` alone."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that start several processes."""
    group = parser.add_argument_group("Processes")
    group.add_argument(
        "--num-processes",
        "--num_processes",
        metavar="N",
        help="start N processes on this machine by `accelerate launch`, `all`: one for each GPU; unset: one process",
    )
    group.add_argument(
        "--accelerate-config",
        "--accelerate_config",
        metavar="NAME",
        help=f"how processes share the work: a profile ({', '.join(PROFILES)}; unset: {DEFAULT_PROFILE}) or a file of "
        "`accelerate config`",
    )


def start_processes(name: str, argv: Sequence[str]) -> int | None:
    """Lets a launcher of a command take the place of this process if flags in `argv` ask for one.

    Returns None if they do not, and 2 after a sentence that says what to change if they cannot be followed.
    """
    try:
        command = launch_command(argv, name)
    except ValueError as error:
        return refuse(name, error)
    return None if command is None else os.execv(command[0], command)


def launch_command(argv: Sequence[str], name: str = "train") -> list[str] | None:
    """The command that starts the processes of `groupgrad train`, or of another command, by the flags in `argv`.

    None without such flags.
    ValueError for a number or a profile that cannot be, and in a process that a launcher has started.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    flags, rest = parser.parse_known_args(argv)
    number, profile = flags.num_processes, flags.accelerate_config
    if number is None and profile is None:
        return None
    if "LOCAL_RANK" in os.environ:
        raise ValueError(
            "this process was started by a launcher (LOCAL_RANK is set), and --num-processes and --accelerate-config "
            "start one; use the flag or the launcher, not both"
        )
    profile = profile or DEFAULT_PROFILE
    count, file = None if number is None else _count(number), _profile(profile)
    if profile in PROFILES and count is None:  # a file may be for several machines, and says their number
        count = _one_for_each_gpu(f"--accelerate-config {profile}", "add --num-processes with a number")
    numbers = [] if count is None else ["--num_processes", str(count)]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(file), *numbers]
    return [sys.executable, *launcher, "-m", "groupgrad", name, *rest]


def _count(text: str) -> int:
    if text == "all":
        return _one_for_each_gpu("--num-processes all", "give a number")
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--num-processes {text} is not a number from 1 on, or 'all'")
    return int(text)


def _one_for_each_gpu(typed: str, remedy: str) -> int:
    """Returns the number of GPUs. ValueError, with the flag that was typed and the remedy, without any."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise ValueError(f"{typed} starts one process for each GPU, and no GPU is visible; {remedy}")
    return count


def _profile(name: str) -> Path:
    if name in PROFILES:
        return PROFILES[name]
    if not Path(name).is_file():
        hint = did_you_mean(name, PROFILES, otherwise=f"the profiles are {', '.join(PROFILES)}")
        raise ValueError(f"--accelerate-config {name} is neither a profile nor a file; {hint}")
    return Path(name)
