"""`groupgrad completion`: prints a script with which a shell completes commands and flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shtab

from groupgrad.apps.cli.command_parser import CommandParser

_HELP = """\
bash: groupgrad completion bash > ~/.local/share/bash-completion/completions/groupgrad
zsh:  groupgrad completion zsh > _groupgrad, in a folder of $fpath
fish: groupgrad completion fish > ~/.config/fish/completions/groupgrad.fish
tcsh: groupgrad completion tcsh > ~/.groupgrad.csh, and `source ~/.groupgrad.csh` in ~/.tcshrc
"""


def main(argv: Sequence[str]) -> int:
    """Prints the script for a shell. Returns 0."""
    arguments = parser().parse_args(argv)
    script = shtab.complete(command_parser(), arguments.shell)
    # Without `default`, bash would complete no file names for this command.
    print(script.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F"))
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "completion", description="Print a script with which a shell completes commands and flags.", examples=_HELP
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return parser


def command_parser() -> argparse.ArgumentParser:
    """Returns a parser of all commands, each with the flags of its own parser."""
    from groupgrad.apps.cli.main import COMMANDS, module_of

    whole = argparse.ArgumentParser(prog="groupgrad")
    commands = whole.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        subparser = module_of(name).parser()
        commands.add_parser(name, help=command.help, parents=[subparser], conflict_handler="resolve")
    return whole
