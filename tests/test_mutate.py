"""The table of mutations fits the source; every mutation is caught by the test that it names."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("mutate.py")


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


def test_every_row_fits_the_source(mutate: ModuleType) -> None:
    rows = mutate.read_mutations()
    assert mutate.stale_rows(rows) == []
    assert len(rows) >= 60
    assert [row.name for row in rows if row.old == row.new] == []


def test_a_row_that_no_longer_fits_is_named(mutate: ModuleType) -> None:
    row = mutate.read_mutations()[0]
    assert "occurs 0 times" in mutate.stale_rows([replace(row, old="nowhere to be found")])[0]
    assert "there is no test" in mutate.stale_rows([replace(row, tests=("tests/test_mutate.py::test_gone[a]",))])[0]
    assert mutate.stale_rows([row, row]) == [f"{row.name}: the name is used twice"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_mutation_is_caught() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_mutation_that_no_assertion_notices_survives(tmp_path: Path) -> None:
    """A changed docstring, and a source that cannot be imported: neither is caught."""
    code = f"""
import sys, dataclasses
sys.path.insert(0, {str(SCRIPT.parent)!r})
import mutate
row = next(row for row in mutate.read_mutations() if row.name == "epsilon")
docstring = dataclasses.replace(row, old="-min(c A, clip(c,", new="-min(c A, cut(c,")
mutate.prepare()
for result in mutate.try_all([docstring, dataclasses.replace(row, new="inside = ratio.clamp(1 - nothing, 1")]):
    print(result.problem)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    docstring, broken = done.stdout.splitlines()
    assert docstring == "the tests pass"
    assert broken.startswith("no assertion failed: NameError")
