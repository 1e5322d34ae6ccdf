"""Entry point of the `groupgrad` command. It imports torch only for a command that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from groupgrad._version import __version__
from groupgrad.apps.cli.command_parser import EXIT_CODES, codes_in_words
from groupgrad.apps.cli.launch import start_processes
from groupgrad.imports import quick_imports
from groupgrad.spelling import did_you_mean
from groupgrad.stopping import EXIT_INTERRUPTED


class Command(NamedTuple):
    """A command of `groupgrad`, whose module has `main(argv)`, which returns the exit status."""

    help: str
    group: str


COMMANDS: dict[str, Command] = {
    "train": Command("train a model with GRPO on a data set", "train"),
    "check": Command("try a run before it begins: settings, data, one small round", "train"),
    "eval": Command("measure a model on a data set: pass@k, intervals, comparison of two", "train"),
    "plan": Command("predict the memory of a run, and say what fits", "train"),
    "sweep": Command("train many configurations in turns, and stop, resume, clone or delete them", "train"),
    "serve": Command("serve a model at an OpenAI-compatible address", "look at runs"),
    "vllm-serve": Command("serve a model with vLLM, for a trainer that pushes weights to it", "train"),
    "view": Command("show runs, finished or in progress, as a local page", "look at runs"),
    "rollouts": Command("print rollouts that a run has stored", "look at runs"),
    "replay": Command("repeat a step of a run and compare every bit", "look at runs"),
    "bisect": Command("find the first step and number at which two runs differ", "look at runs"),
    "demo": Command("make a small model, train it with GRPO, show before and after", "set up"),
    "env": Command("print versions and devices, for a bug report", "set up"),
    "completion": Command("print a script that completes commands in a shell", "set up"),
}

LAUNCHED = ("train", "check", "eval")
"""Commands that flags start on several processes."""

PRINTING = ("plan", "rollouts", "bisect", "env", "completion")
"""Commands whose work is what they print."""


def module_of(command: str) -> ModuleType:
    """Imports the module of a command."""
    with quick_imports():
        return import_module(f"groupgrad.apps.cli.{command.replace('-', '_')}")


_EXAMPLES = """\
examples:
  groupgrad train --config run.yaml --learning_rate 2e-6
  groupgrad check --config run.yaml
  groupgrad eval runs/math --k 1,8
  groupgrad sweep sweep.yaml
  groupgrad view runs/math
  groupgrad rollouts runs/math --step 40 --min-reward 0.5
  groupgrad serve runs/math --port 8000
  groupgrad replay runs/math --step 137 --row 5
  groupgrad bisect runs/math runs/math_again
  groupgrad env --model Qwen/Qwen2.5-0.5B-Instruct
"""


def usage() -> str:
    """Returns the text of `groupgrad --help`."""
    groups: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        groups.setdefault(command.group, []).append(f"  {name:<12}{command.help}")
    commands = "\n\n".join("\n".join([f"{group}:", *rows]) for group, rows in groups.items())
    return (
        f"usage: groupgrad COMMAND [options]\n\n"
        f"Group relative policy optimization (GRPO) for language models.\n\n"
        f"{commands}\n\n{_EXAMPLES}\n{codes_in_words(EXIT_CODES)}\n"
        f"`groupgrad COMMAND --help` lists options and exit codes of a command, `groupgrad --version` the version.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command named in `argv` (default: the process's arguments). Returns the exit status, 2 for an unknown
    command, 130 for one that Ctrl-C has ended."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if arguments else 2
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a loss may be a module of the folder in which the command runs
    if arguments[0] in ("-V", "--version"):
        print(f"groupgrad {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, before="; ")
        print(f"groupgrad: error: there is no command {name!r}{hint}\n\n{usage()}", file=sys.stderr, end="")
        return 2
    try:
        return _run(name, rest)
    except KeyboardInterrupt:
        if os.environ.get("GROUPGRAD_TRACEBACK"):
            raise
        print(f"\ngroupgrad {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(command: str, arguments: Sequence[str]) -> int:
    """Runs a command, or the launcher that its flags ask for."""
    if command in LAUNCHED and (status := start_processes(command, arguments)) is not None:
        return status
    is_printing = command in PRINTING or (command == "sweep" and arguments[:1] == ["status"])
    return _printed(command, arguments) if is_printing else module_of(command).main(arguments)


def _printed(command: str, arguments: Sequence[str]) -> int:
    """Runs a command that prints; it ends without an error when its reader, such as `head`, has read enough."""
    try:
        status = module_of(command).main(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed at the end
        return 0


if __name__ == "__main__":
    sys.exit(main())
