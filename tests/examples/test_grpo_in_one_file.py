"""The algorithm in one file, on `groupgrad.objectives` alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo_in_one_file.py"


@pytest.mark.slow
def test_it_learns(from_examples):
    history = from_examples("grpo_in_one_file").train(steps=60, seed=0)
    assert sum(history[:5]) / 5 < 0.25
    assert sum(history[-5:]) / 5 > 0.85


def test_it_stands_on_the_objectives_and_fits_on_a_few_screens():
    text = SCRIPT.read_text()
    modules = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.startswith("groupgrad")} == {"groupgrad.objectives"}
    assert len(text.splitlines()) <= 250
