"""Every code block of the documents runs, parses, or says why it cannot.

A comment `<!-- not run: REASON -->` on the line before a block leaves it out, and `<!-- run by: tests/FILE -->` names
the test that runs it. A text block that directly follows a bash block is what its commands print. Python blocks of a
page run in order and share their names, in a folder with small stand-ins for the models and data sets that they name.
The commands of `SHELL_PAGES` run page after page over the files that these pages make.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted_agents import with_tools

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for folder in (".", "docs", "recipes", "bench") for page in (ROOT / folder).glob("*.md"))
SHELL_PAGES = [ROOT / "docs" / f"{name}.md" for name in ("quick-start", "view", "sweep", "replay", "evaluation")]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"<!-- (not run|run by): (.+) -->\n$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    code: str
    reason: str | None
    """Why it is not run here; None if it is."""
    line: int
    runner: str | None = None
    """The test that runs it instead."""
    is_output: bool = False
    """True for text that directly follows a bash block that is run."""


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    after_bash = 0
    for match in _BLOCK.finditer(text):
        reason = _REASON.search(text[: match.start()])
        yield Block(
            match[1],
            match[2],
            reason and reason[2],
            line=text.count("\n", 0, match.start()) + 2,
            runner=reason[2] if reason and reason[1] == "run by" else None,
            is_output=match[1] in ("", "text") and text[after_bash : match.start()] == "\n\n",
        )
        is_run = reason is None or reason[1] == "run by"
        after_bash = match.end() if match[1] == "bash" and is_run else 0


def chosen(language: str) -> list[Any]:
    return [
        pytest.param(page, id=name)
        for page, name in zip(PAGES, IDS)
        if any(block.language == language and block.reason is None for block in blocks(page))
    ]


@pytest.fixture
def names(make_model: Any, make_tokenizer: Any) -> dict[str, Any]:
    """Names that pages may use without defining them."""
    chat_model = make_model(max_position_embeddings=4096)
    return {"__name__": "__main__", "chat_model": chat_model, "chat_tokenizer": with_tools(make_tokenizer())}


@pytest.mark.parametrize("page", chosen("python"))
def test_python_runs(page: Path, hub: Path, affordable: None, names: dict[str, Any]) -> None:
    (hub / "recipes").symlink_to(ROOT / "recipes")
    for block in blocks(page):
        if block.language == "python" and block.reason is None:
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_blocks_have_a_known_language_and_python_parses(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("", "bash", "bibtex", "json", "python", "text", "yaml"), f"line {block.line}"
        if block.language == "python":
            ast.parse(block.code)
        if block.language == "yaml":
            yaml.safe_load(block.code)


def unexplained(page: Path) -> list[int]:
    """Lines of the blocks that no test runs and that do not say why."""
    return [
        block.line
        for block in blocks(page)
        if block.reason is None
        and not block.is_output
        and block.language not in ("python", "yaml")
        and not (block.language == "bash" and page in SHELL_PAGES)
    ]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_block_is_run_or_says_why_not(page: Path) -> None:
    assert unexplained(page) == []
    for block in blocks(page):
        for path in re.findall(r"tests/[\w./]+\w", block.reason or ""):
            assert (ROOT / path).exists(), f"line {block.line}: {path}"
        if block.runner is not None:
            assert page.name in (ROOT / block.runner).read_text(encoding="utf-8"), f"line {block.line}"


def test_blocks_that_nobody_runs_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nls\n```\n\n```text\na  b\n```\n\n```text\nc\n```\n\n"
        "<!-- not run: no shell -->\n```bash\nls\n```\nIt prints\n\n```\nd\n```\n"
    )
    assert unexplained(page) == [2, 10, 20]


def words_of(text: str) -> str:
    """The words of an output without those that hold a digit, which differ from run to run; times are in seconds."""
    text = re.sub(r"(\d)\s+(ms|min|h)\b", r"\1 s", text)  # a fast machine may need milliseconds
    return " ".join(word for word in text.split() if not re.search(r"\d", word))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_print_what_the_page_shows(hub: Path, affordable: None, names: dict[str, Any]) -> None:
    """Of all `SHELL_PAGES` in turn. Numbers of an output, and parts that are left out by a line `...`, may be any."""
    programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed = None
    for page in SHELL_PAGES:
        for block in blocks(page):
            place = f"{page.name}, line {block.line}"
            if block.is_output and printed is not None:
                for part in block.code.split("\n...\n"):
                    assert words_of(part) in words_of(printed), place
            printed = None
            if block.reason is None and block.language == "python":
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
            if block.reason is None and block.language == "bash":
                command = ["bash", "-eo", "pipefail", "-c", block.code]
                environment = {**os.environ, **programs}
                done = subprocess.run(command, check=False, env=environment, text=True, capture_output=True)
                code = re.search(r"# exit code (\d)", block.code)
                assert done.returncode == int(code[1] if code else 0), f"{place}: {done.stderr[-2000:]}"
                printed = done.stdout


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(block.language == "bash" for block in blocks(p))], ids=lambda page: page.name
)
def test_commands_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for block in blocks(page):
        if block.language != "bash":
            continue
        subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        for line in block.code.replace("\\\n", " ").splitlines():
            words = [word for word in line.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
            if words[:1] == ["make"]:
                assert words[1] in targets, line
            for path in re.findall(r"\b(?:examples|recipes|bench|tests)/[\w./-]+", line):
                assert (ROOT / path).exists(), path
            for extra in re.findall(r'"\.\[(\w+)\]"', line):
                assert f"\n{extra} = [" in project, extra
