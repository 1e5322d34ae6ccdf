"""Entry point of the `groupgrad` command. It imports torch only for a command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from groupgrad._version import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("groupgrad.cli.train", "train a model with GRPO on a data set"),
    "vllm-serve": ("groupgrad.cli.vllm_serve", "serve a model with vLLM, for a trainer that pushes weights to it"),
    "env": ("groupgrad.cli.env", "print versions and devices, for a bug report"),
}
"""Command -> (module with `main(argv)`, which returns the exit status; one line of help)."""


def usage() -> str:
    """Returns the text of `groupgrad --help`."""
    rows = "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())
    return (
        f"usage: groupgrad COMMAND [options]\n\n"
        f"Group relative policy optimization (GRPO) for language models.\n\n"
        f"commands:\n{rows}\n\n"
        f"`groupgrad COMMAND --help` lists the options of a command; `groupgrad --version` prints the version.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command named in `argv` (default: the process's arguments). Returns the exit status, 2 for an unknown
    command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"groupgrad {__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        import difflib

        similar = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        print(f"groupgrad: error: there is no command {command!r}{hint}\n\n{usage()}", file=sys.stderr, end="")
        return 2
    return import_module(COMMANDS[command][0]).main(rest)


if __name__ == "__main__":
    sys.exit(main())
