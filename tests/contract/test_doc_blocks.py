"""Every code block of the documents runs, parses, or says why it cannot.

A comment `<!-- not run: REASON -->` on the line before a block leaves it out. Python blocks of a page run in order and
share their names, in a folder with small stand-ins for the models and data sets that they name.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted_agents import with_tools

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"<!-- not run: (.+) -->\n$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    code: str
    reason: str | None
    """Why it is not run; None if it is."""
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        reason = _REASON.search(text[: match.start()])
        yield Block(match[1], match[2], reason and reason[1], text.count("\n", 0, match.start()) + 2)


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


@pytest.mark.parametrize("page", chosen("bash"))
def test_commands_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for block in blocks(page):
        if block.language != "bash" or block.reason is not None:
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
