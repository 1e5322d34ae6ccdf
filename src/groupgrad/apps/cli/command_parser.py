"""Argument parser of all commands: help with examples and exit codes, and errors that suggest the intended name."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, NoReturn

from groupgrad.spelling import did_you_mean, nearest

EXIT_CODES: dict[int, str] = {
    0: "all was done",
    1: "it failed while it ran, or did not find or reach what it should",
    2: "the command line, the configuration or the data cannot work; nothing was begun",
    70: "a phase hung, or another rank ended, and this process did not react; stderr names the cause",
    73: "the disk refused the last checkpoint; all steps were made",
    75: "stopped by SIGTERM, SIGUSR1 or SIGHUP after a checkpoint; start again with --resume_from_checkpoint auto",
    130: "stopped by Ctrl-C; training then writes a checkpoint after its step, unless a second one follows",
}
"""Exit status -> what it means."""

_ENDED = "it was ended by Ctrl-C"
_SAME_COMMAND = "the same command goes on"
_OF_COMMANDS: dict[str, dict[int, str]] = {
    "train": {0: "all steps were made, and the weights are finite", **{code: EXIT_CODES[code] for code in (70, 73, 75)}}
    | {130: EXIT_CODES[130]},
    "check": {1: "something that was found is an error, or the round failed", 70: EXIT_CODES[70]},
    "eval": {70: EXIT_CODES[70]},
    "plan": {0: "something fits", 1: "nothing fits"},
    "sweep": {1: "an arm failed", 75: f"stopped by a signal; {_SAME_COMMAND}", 130: f"stopped; {_SAME_COMMAND}"},
    "serve": {0: _ENDED},
    "vllm-serve": {1: "the server failed; any other status is that of vLLM's server too"},
    "view": {0: f"{_ENDED}, or the file was written"},
    "rollouts": {1: "none is like that"},
    "replay": {0: "every bit is the same", 1: "something differs"},
    "bisect": {0: "nothing differs", 1: "something differs"},
    "demo": {0: "the promised accuracies were met", 1: "they were missed"},
    "env": {},
    "completion": {},
}
"""Command -> its exit statuses that differ from others' or that it alone has."""
COMMAND_CODES: dict[str, dict[int, str]] = {
    name: {code: EXIT_CODES[code] for code in (0, 1, 2)} | {130: "stopped by Ctrl-C"} | codes
    for name, codes in _OF_COMMANDS.items()
}
"""Command -> its exit status -> what it means."""
del COMMAND_CODES["vllm-serve"][130]


def epilog(command: str, examples: str) -> str:
    """Returns the end of a command's help: its examples, one a line, and its exit codes."""
    shown = "\n".join(f"  {line}" for line in examples.strip().splitlines())
    return f"examples:\n{shown}\n\n{codes_in_words(COMMAND_CODES[command])}"


def codes_in_words(codes: dict[int, str]) -> str:
    """Returns exit codes and their meanings as lines."""
    return "\n".join(["exit codes:", *(f"  {code:<5}{meaning}" for code, meaning in sorted(codes.items()))]) + "\n"


class CommandHelp(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each flag, VALUE instead of the flag's name in capitals, and defaults that are set."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=44, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        flag = next((option for option in action.option_strings if option.startswith("--")), action.option_strings[0])
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{flag.removeprefix('--')}"
        value = self._get_default_metavar_for_optional(action) if action.metavar is None else str(action.metavar)
        return flag + {0: "", "?": f" [{value}]", "+": f" {value} ..."}.get(action.nargs, f" {value}")

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        choices = ",".join(map(str, action.choices or ()))
        return f"{{{choices}}}" if 0 < len(choices) <= 40 else "VALUE"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_off = action.default is False and action.nargs == 0
        return action.help if action.default is None or is_off else super()._get_help_string(action)


class HelpfulParser(argparse.ArgumentParser):
    """Parser whose errors are a sentence, with the name that may have been meant by one that is unknown."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            hint = did_you_mean(value, choices, before="; ")
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(choices)}{hint}")

    def error(self, message: str) -> NoReturn:
        """Prints the problem and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n(`{self.prog} --help` lists all options)\n")


class CommandParser(HelpfulParser):
    """Parser of one command. Options may be written with hyphens or underscores."""

    def __init__(self, command: str, *, description: str, examples: str, **options: Any) -> None:
        super().__init__(
            prog=f"groupgrad {command}",
            description=textwrap.fill(description, 118),
            epilog=epilog(command, examples),
            formatter_class=CommandHelp,
            allow_abbrev=False,
            **options,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses a command line. Exits with status 2, and the option that may have been meant, for an unknown one."""
        known = list(self._option_string_actions)
        words = [_spelled_as(word, known) for word in args]
        # Before argparse, which would name an option that is missing instead. As there, a word with spaces is a value.
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known and " " not in name:
                similar = nearest(name, known)
                self.error(f"unknown option {name!r}" + (f"; did you mean {similar}?" if similar else ""))
        return super().parse_args(words, namespace)


def positive_count(text: str) -> int:
    """Returns the number that an option has, 1 or more; argparse shows the error for what is none."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no count; give 1 or more")
    return int(text)


def port_number(text: str) -> int:
    """Returns the port that an option names; argparse shows the error for what is none."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give 1 to 65535, or 0 for any that is free")
    return int(text)


def in_columns(rows: Mapping[str, Any]) -> list[str]:
    """Lines of names and what they have, in two columns."""
    width = max(map(len, rows))
    return [f"{name:<{width}}  {text}" for name, text in rows.items()]


def refuse(command: str, error: Exception, status: int = 2) -> int:
    """Prints why a command fails, and returns its exit status.

    If the variable GROUPGRAD_TRACEBACK is set, the error is raised instead. BrokenPipeError is always raised:
    the reader of standard output has ended.
    """
    if os.environ.get("GROUPGRAD_TRACEBACK") or isinstance(error, BrokenPipeError):
        raise error
    print(f"groupgrad {command}: error: {error}\n(GROUPGRAD_TRACEBACK=1 shows where)", file=sys.stderr)
    return status


def _spelled_as(word: str, known: list[str]) -> str:
    """Returns an option in the spelling of the parser: `--min_reward` as `--min-reward`, or the other way round."""
    name, equals, value = word.partition("=")
    if not name.startswith("--") or name in known:
        return word
    found = {option.replace("_", "-"): option for option in known}.get(name.replace("_", "-"))
    return word if found is None else found + equals + value
