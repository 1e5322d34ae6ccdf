"""`docs/features.md` names every feature of the surface, and for each a test that exists."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUM_FEATURES = 127
STATES = ("works", "in part: ", "not yet: ")


@dataclass(slots=True, frozen=True)
class Row:
    """One line of a table."""

    number: int
    """0 for what goes beyond the surface."""
    feature: str
    state: str
    tests: tuple[str, ...]


def read_rows() -> list[Row]:
    """The rows of all tables, in order."""
    rows = []
    for line in (ROOT / "docs" / "features.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and (cells[0].isdigit() or cells[0] == "+"):
            number = int(cells[0].replace("+", "0"))
            rows.append(Row(number, cells[1], cells[2], tuple(re.findall(r"`([^`]+)`", cells[3]))))
    return rows


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests in a file, those of a class behind its name: `test_a`, `TestB::test_c`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return frozenset(name for name in found if name.rsplit("::", 1)[-1].startswith("test_"))


def test_every_feature_has_its_row() -> None:
    assert [row.number for row in read_rows() if row.number] == list(range(1, NUM_FEATURES + 1))


def problem_of(row: Row) -> str:
    """Returns the fault of a row, or an empty text."""
    if not row.feature or not row.state.startswith(STATES) or not row.tests:
        return "it names no feature, no state or no test"
    if row.state.startswith("not yet") and not re.search("raise|there is no such command|a warning that", row.state):
        return "it does not say what happens instead"
    for test in row.tests:
        path, _, name = test.partition("::")
        if not (ROOT / path).is_file() or name not in names_in(ROOT / path):
            return f"there is no test {test}"
    return ""


def test_every_row_names_tests_that_exist() -> None:
    assert {f"{row.number} {row.feature}": found for row in read_rows() if (found := problem_of(row))} == {}


def test_a_name_that_is_no_test_is_found_out() -> None:
    assert "test_every_feature_has_its_row" in names_in(Path(__file__))
    assert "read_rows" not in names_in(Path(__file__))
    assert "TestTrackers::test_both_get_a_table_of_text" in names_in(ROOT / "tests/run_folder/test_completions.py")
