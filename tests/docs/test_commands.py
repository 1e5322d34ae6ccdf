"""Every `groupgrad` command that a document shows is one that its parser takes: a removed or misspelled flag fails."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from groupgrad.apps.cli.main import COMMANDS, module_of, usage

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(path for name in ("docs", "recipes", "bench", "examples") for path in (ROOT / name).rglob("*.md")),
]
OTHERS = [path for kind in ("yaml", "sh", "slurm", "py") for path in (ROOT / "examples").rglob(f"*.{kind}")]
SHELL = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(groupgrad [a-z-]+ [^`]*)`")


def commands_of(script: str) -> Iterator[list[str]]:
    """The words after `groupgrad` of each command of a shell script that starts it, directly or by a launcher."""
    for line in script.replace("\\\n", " ").splitlines():
        if not re.search(r"(?<!from )\bgroupgrad [a-z-]", line):
            continue  # such as a line of Python, whose quotes may span lines
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if not re.fullmatch(r"[|&;<>]+", word):
                command.append(word)
                continue
            places = [i for i, name in enumerate(command) if name == "groupgrad" and is_started(command[:i])]
            if places and len(command) > places[0] + 1:
                yield [word for word in command[places[0] + 1 :] if not word.startswith("$")]
            command = []


def is_started(before: list[str]) -> bool:
    """True if a shell runs the word that follows these as a program or as a module."""
    return before[-1:] == ["-m"] or all("=" in w or w.endswith(":") or w in ("exec", "do") for w in before)


@cache
def parser_of(command: str) -> Any:
    return module_of(command).parser()


def check(words: list[str]) -> None:
    """AssertionError, or SystemExit of the parser, for a command line that is refused before anything is looked at."""
    command, *arguments = words
    if command in ("--help", "--version"):
        return
    assert command in COMMANDS, f"there is no command {command!r}"
    if command == "vllm-serve":
        return  # vLLM's own parser has its flags
    parser = parser_of(command)
    arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    settings = [value for flag, value in pairwise(arguments) if flag == "--set"]
    if command in ("train", "check"):
        unknown = parser.parse_known_args(arguments)[1]
        assert not unknown, f"unknown: {' '.join(unknown)}"
        parser.take_settings(settings, arguments)
        return
    if command == "plan" and "--config" in arguments:
        arguments = ["--model", "of the file", *arguments]
    parser.parse_args(arguments)


@pytest.mark.parametrize("path", [*PAGES, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_document_are_parsed(path: Path, capsys: Any) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        scripts = SHELL.findall(text)
    elif path.suffix in (".yaml", ".py"):
        scripts = re.findall(r"^(?:#\s+)?(groupgrad [a-z-]+ .*)$", text.replace("\\\n#", " "), re.MULTILINE)
    else:
        scripts = [text]
    for words in (words for script in scripts for words in commands_of(script)):
        try:
            check(words)
        except (AssertionError, SystemExit) as error:
            pytest.fail(f"groupgrad {' '.join(words)}: {error} {capsys.readouterr().err}")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_in_the_text_of_a_document_exist(path: Path) -> None:
    for span in INLINE.findall(path.read_text(encoding="utf-8")):
        command = span.split()[1]
        if command not in COMMANDS or command == "vllm-serve":
            continue
        known = {option.replace("_", "-") for action in parser_of(command)._actions for option in action.option_strings}
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span.partition(" -- ")[0]):
            assert flag.replace("_", "-") in known, f"`{span}`: {command} has no {flag}"


@pytest.mark.parametrize(
    "line",
    [
        "groupgrad train --config run.yaml --lerning_rate 1e-6",
        "CUDA_VISIBLE_DEVICES=0 groupgrad check --config run.yaml --set lora=1",
        "torchrun --nproc_per_node 2 -m groupgrad train --config run.yaml --no-such",
        "groupgrad rollouts out --step 40 --token entropy | less",
        "groupgrad plan --config run.yaml --device  # which needs a size",
        "groupgrad sweeep sweep.yaml",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    (words,) = commands_of(line)
    with pytest.raises((AssertionError, SystemExit)):
        check(words)


def test_words_that_start_no_command_are_left_alone() -> None:
    assert (
        list(commands_of("pip install groupgrad --upgrade\n# groupgrad trains models\ncd groupgrad && make check"))
        == []
    )


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "vllm-serve"])
def test_the_examples_of_the_help_are_parsed(command: str) -> None:
    text = parser_of(command).epilog.partition("examples:\n")[2].partition("\n\n")[0]
    own = [line for line in usage().splitlines() if line.startswith(f"  groupgrad {command} ")]
    found = list(commands_of("\n".join([text, *own])))
    assert found
    for words in found:
        assert words[0] == command
        check(words)
